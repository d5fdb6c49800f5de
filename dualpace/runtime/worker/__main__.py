"""`python -m dualpace.runtime.worker`: started by the engine, never by a person."""

from dualpace.runtime.worker.main import main

if __name__ == "__main__":
    main()
