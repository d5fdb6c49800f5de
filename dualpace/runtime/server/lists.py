"""Lists that bodies may have. Each is judged up to its first fault: there may be millions of
entries, and a complaint about each of them would take all memory.
"""

from typing import Annotated

from pydantic import Field

FIRST_FAULT = Field(fail_fast=True)

Texts = Annotated[list[str], FIRST_FAULT]
TokenIds = Annotated[list[int], FIRST_FAULT]
