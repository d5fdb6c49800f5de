"""Serves a model over HTTP: `python scripts/serve.py [+hw=NAME] [key=value ...]`."""

from dualpace.cli import serve

if __name__ == "__main__":
    serve()
