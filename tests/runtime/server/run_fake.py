"""The real server process around the fake engine: `python run_fake.py PLAN_JSON`."""

import logging
import sys

from byte_tokenizer import ByteTokenizer

from dualpace.errors import ConfigError
from dualpace.runtime.plan import Plan
from dualpace.runtime.server import serve

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    try:
        plan = Plan.from_json(sys.argv[1])
        serve(plan, "fake_engine", lambda source: ByteTokenizer(source != "fake:no-template"))
    except ConfigError as error:
        sys.exit(str(error))
