"""The packaged model: logits and tokens equal the reference's, read from the same file."""

from __future__ import annotations

from typing import Any

import torch

from dualpace.graphs.executor import Stages
from dualpace.graphs.source import Source
from dualpace.graphs.tokenizer import Tokenizer
from tests.graphs.reference import KV, assert_close, hf_logits, run_logits

TEXTS = [
    "What is the capital of France?",
    "def f(x):\n    return x**2  # 3.14159\n\n日本語 émoji 😀 it's 2024-01-31\t<|im_end|> ok",
    "The history of computing spans many centuries. Early devices such as the abacus gave way to "
    "mechanical calculators built by Pascal and Leibniz, and later to the analytical engine.",
    "   leading, trailing   and  double spaces  \n\n\n",
    "¿Qué tal? Ça va — naïve façade; Ελληνικά, русский, العربية, हिन्दी, 한국어 👩‍👩‍👧",
    "",
]


def test_logits_equal_the_reference(
    smollm2: Source, smollm2_stages: Stages, smollm2_tokenizer: Tokenizer, hf_smollm2: Any
) -> None:
    for text in TEXTS[:3]:
        prompt = smollm2_tokenizer.chat([{"role": "user", "content": text}])
        ids = smollm2_tokenizer.encode(prompt, add_special_tokens=False)
        ours = run_logits(smollm2_stages, smollm2.spec.num_layers, ids)
        theirs = hf_logits(hf_smollm2, ids)
        assert_close(ours, theirs, 1e-5)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_greedy_answer_is_sensible(
    smollm2: Source, smollm2_stages: Stages, smollm2_tokenizer: Tokenizer
) -> None:
    prompt = smollm2_tokenizer.chat([{"role": "user", "content": TEXTS[0]}])
    ids, kv = smollm2_tokenizer.encode(prompt, add_special_tokens=False), KV()
    answer: list[int] = []
    while len(answer) < 16 and not set(answer) & set(smollm2_tokenizer.eos_ids):
        logits = run_logits(smollm2_stages, smollm2.spec.num_layers, ids, kv)
        ids = [int(logits[-1].argmax())]
        answer += ids
    assert smollm2_tokenizer.decode(answer) == "The capital of France is Paris."


def test_tokenizer_equals_the_reference(
    smollm2_tokenizer: Tokenizer, hf_smollm2_tokenizer: Any
) -> None:
    for text in TEXTS:
        ids = smollm2_tokenizer.encode(text)
        assert ids == hf_smollm2_tokenizer(text)["input_ids"]
        for skip in (True, False):
            theirs = hf_smollm2_tokenizer.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert smollm2_tokenizer.decode(ids, skip) == theirs
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi <there> & 'you'"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    theirs = hf_smollm2_tokenizer.apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=True
    )
    assert smollm2_tokenizer.chat(conversation) == theirs
