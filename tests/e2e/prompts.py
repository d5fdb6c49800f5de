"""Twenty prompts that differ in kind and length."""

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "Water boils at a temperature of",
    "Liebe Grüße aus",
    "The three primary colours are red,",
    "<|im_start|>user\nWrite one sentence about the ocean.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n",
    "A",
    "In 1969, the first people walked on the Moon. Their names were",
    "SELECT name, age FROM users WHERE",
    '{"name": "Ada", "born": 1815, "city":',
    "To be, or not to be,",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "Photosynthesis is the process by which plants turn light, water and carbon dioxide into",
    "日本の首都は",
    "Dear Sir or Madam,\n\nI am writing to",
    "The history of computing spans many centuries. Early devices such as the abacus gave way to "
    "mechanical calculators, and later engineers designed machines that could follow a programme. "
    "In the twentieth century, vacuum tubes made way for transistors, and these for integrated "
    "circuits, so that today",
    "Ingredients: 200 g flour, 2 eggs, a pinch of salt.\nMethod: first,",
]
