"""Who gets an address: found out before an engine is started."""

import pytest

from dualpace.errors import ConfigError
from dualpace.runtime.server.lifecycle import bind


def test_of_two_servers_that_start_at_once_one_gets_the_port() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"server.port={port} on 127.0.0.1 cannot be used"):
            bind("127.0.0.1", port)
