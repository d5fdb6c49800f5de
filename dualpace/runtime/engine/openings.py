"""Requests that wait for the form of their answer to be compiled. Knows no queues or workers."""

import asyncio
import logging
from collections.abc import Callable

from dualpace.runtime.engine.conversations import Conversation
from dualpace.runtime.engine.forms import FormRefused, Forms, FormsBusy
from dualpace.runtime.structured import Structure

log = logging.getLogger(__name__)


class Openings:
    def __init__(
        self,
        forms: Forms,
        admit: Callable[[Conversation], None],
        refuse: Callable[[Conversation, str, str, bool], None],
    ) -> None:
        """Of each conversation one is called, unless it is cancelled: `refuse` with a sentence, the
        parameter to blame and whether it may do later."""
        self._forms = forms
        self._admit = admit
        self._refuse = refuse
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by request

    def __len__(self) -> int:
        """Requests that wait here."""
        return len(self._tasks)

    def open(self, conversation: Conversation, structure: Structure) -> None:
        task = asyncio.create_task(self._open(conversation, structure))
        self._tasks[conversation.request.id] = task

    def cancel(self, request_id: int) -> bool:
        """Gives a request up; returns whether it was waiting here."""
        task = self._tasks.pop(request_id, None)
        return task is not None and task.cancel()

    def close(self) -> None:
        """Gives all up; none of them is admitted or refused any more."""
        for task in self._tasks.values():
            task.cancel()
        self._forms.close()

    async def _open(self, conversation: Conversation, structure: Structure) -> None:
        refusal, is_busy = "", False
        try:
            conversation.keep_to(await self._forms.guide(structure))
        except FormRefused as error:
            refusal, is_busy = str(error), isinstance(error, FormsBusy)
        except Exception:
            log.exception("a form could not be compiled")
            refusal = "it could not be compiled: the server's log says more"
        del self._tasks[conversation.request.id]
        if refusal:
            blamed = structure.asked_as
            self._refuse(conversation, f"{blamed}: {refusal}.", blamed, is_busy)
        else:
            self._admit(conversation)
