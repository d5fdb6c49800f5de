"""Which DualPace this is."""

import importlib.metadata


def version() -> str:
    """As installed; a checkout that merely lies on the path says no number."""
    try:
        return importlib.metadata.version("dualpace")
    except importlib.metadata.PackageNotFoundError:
        return "0+checkout"
