"""What `scripts/profile_hw.py` does: measures the points that are missing, then ends the sweep."""

import json

from dualpace.errors import ConfigError
from dualpace.runtime.profile.child import point_file
from dualpace.runtime.profile.finish import finish
from dualpace.runtime.profile.sweep import Sweep
from dualpace.settings.schema import ProfileHwConfig


def run(config: ProfileHwConfig) -> None:
    """The last line on stdout is one JSON object."""
    sweep = Sweep(config)
    failed = sweep.measure()
    if failed:
        reasons = "; ".join(dict.fromkeys(failed.values()))
        raise ConfigError(
            f"{len(failed)} of {len(sweep.points)} points failed ({reasons}): the others are kept "
            f"in {sweep.folder}, run the same command again to measure only these."
        )
    if config.profile.point not in (None, "fit"):
        files = [str(point_file(sweep.folder, point)) for point in sweep.points]
        print(json.dumps({"profile": sweep.name, "points": files}))
        return
    print(json.dumps(finish(sweep)))
