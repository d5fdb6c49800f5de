"""`python -m tests.runtime.engine.played_host`: a process that tries forms by a compiler that does
what a text says."""

import os
import signal

from dualpace.runtime.engine import trial_host
from dualpace.runtime.plan import ModelPlan
from tests.runtime.engine.forms_case import SevensCompiler, SevensForm


class PlayedCompiler(SevensCompiler):
    """Beside the usual texts: "abort", "killed", "hang" and "stop", which stops who forked."""

    def compile(self, kind: str, text: str) -> SevensForm:
        if text == "abort":
            os.abort()
        if text == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "stop":
            os.kill(os.getppid(), signal.SIGSTOP)
        while text in ("hang", "stop"):
            signal.pause()
        return super().compile(kind, text)


def load(model: ModelPlan) -> PlayedCompiler:
    assert isinstance(model, ModelPlan) and model.eos_token_ids == (2, 0)
    return PlayedCompiler()


if __name__ == "__main__":
    trial_host.main(load)
