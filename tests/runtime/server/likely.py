"""What the fake engine says of every token, so that tests can say what must arrive."""

import numpy as np
from byte_tokenizer import VOCAB

DRAWN_LOGPROB, DRAWN_RANK = -1.0, 2


def likeliest(token: int, count: int) -> list[tuple[int, float]]:
    """The token after it is likelier, those after that less and less so."""
    ids = [token + 1, token, *(token + i for i in range(2, count + 1))]
    return [(id % VOCAB, -0.5 * place) for place, id in enumerate(ids[:count], start=1)]


def told(tokens: list[int], asked: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """`asking` and `logprobs` of a message with these tokens (`messages.asks_for` by token)."""
    asking = [place for place, asks in enumerate(asked) if asks]
    best = max(asked) - 1
    rows = []
    for place in asking:
        likely = [(tokens[place], DRAWN_LOGPROB), *likeliest(tokens[place], best)]
        ids, values = zip(*likely, strict=True)
        words = np.array(values, np.float32).view(np.int32).tolist()
        rows += [*ids, *words, DRAWN_RANK]
    return np.array(asking, np.int32), np.array(rows, np.int32)
