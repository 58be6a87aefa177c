# SPDX-License-Identifier: Apache-2.0
"""Forty prompts of four kinds, of staggered lengths. Those of a kind share a beginning, so that prefixes are reused."""

CODE_PREAMBLE = (
    "You are a careful programmer. Write small, plain functions with type hints and one docstring line each, "
    "and never use a library where a loop of three lines would do.\n\n"
)
CHAT_PREAMBLE = (
    "The following is a conversation between a curious user and a helpful assistant. The assistant answers in "
    "short, friendly sentences, says so when it does not know, and never invents names or numbers.\n\n"
)
JSON_PREAMBLE = (
    "Answer with one JSON object and nothing else. Use the keys of the example, in its order, and no others.\n"
    'Example: {"name": "Ada", "age": 36, "languages": ["English", "French"], "active": true}\n\n'
)
PROSE_PREAMBLE = (
    "Continue the story in the same voice. Keep to the past tense, keep the sentences long, and let nothing "
    "happen too quickly.\n\n"
)

CODE = (
    "def fibonacci(n: int) -> int:",
    "Write a function that reverses the words of a sentence, keeping their letters in order.",
    "class Stack:\n    def __init__(self) -> None:\n        self.items = []\n\n    def push(self, item) -> None:",
    "# Sort a list of (name, age) pairs by age, oldest first, and by name where ages are equal.\n",
    "def is_prime(n: int) -> bool:\n    if n < 2:\n        return False\n",
    "SELECT name, count(*) FROM orders GROUP BY name HAVING",
    "for (int i = 0; i < n; i++) {\n    sum += values[i];\n}\nreturn sum;\n}\n\nint maximum(",
    "import csv\n\ndef read_table(path: str) -> list[dict]:\n    with open(path) as file:\n",
    "Explain, then fix, the error in this function:\ndef mean(values):\n    return sum(values) / len(values) - 1\n",
    "def binary_search(values: list[int], wanted: int) -> int:\n    low, high = 0, len(values)\n    while low < high:\n"
    "        middle = (low + high) // 2\n        if values[middle] < wanted:\n            low = middle + 1\n",
)
CHAT = (
    "User: What is the capital of France?\nAssistant:",
    "User: Hi!\nAssistant: Hello! How can I help you today?\nUser: I would like to learn to cook.\nAssistant:",
    "User: Why is the sky blue?\nAssistant:",
    "User: Can you recommend a book about the sea? I liked the last one very much.\nAssistant:",
    "User: My plant has yellow leaves. What should I do?\nAssistant: How often do you water it?\nUser: Every day."
    "\nAssistant:",
    "User: What is 17 times 23? Please show the steps, one a line, and the answer at the end.\nAssistant:",
    "User: Tell me a joke.\nAssistant:",
    "User: How do I tie a bowline knot?\nAssistant:",
    "User: Write a polite letter to my landlord about the broken heating, which I reported twice already.\nAssistant:",
    "User: What is the difference between weather and climate? Answer as if I were ten years old, please, and use "
    "an example with clothes in it.\nAssistant:",
)
JSON = (
    '{"name": "Grace", "age":',
    "Describe a cat named Tom.\n",
    '[{"id": 1, "title": "Dune", "year": 1965}, {"id": 2, "title":',
    "Describe a sailor who speaks four languages and is no longer active.\n{",
    '{"type": "object", "properties": {"street": {"type": "string"}, "number": {"type":',
    "Describe the oldest person in a village by the sea, whose name begins with the letter B.\n",
    '{"users": [{"name": "A", "roles": ["admin", "editor"]}, {"name": "B", "roles": [',
    "Describe a programmer.\n",
    '{"temperature": 21.5, "unit": "celsius", "readings": [21.1, 21.3, 21.4, 21.5,',
    "Turn this line into an object: Marie Curie, 66, Polish, French, Russian, not active since 1934.\n",
)
PROSE = (
    "The train left the station at dawn.",
    "Once upon a time, in a house at the end of a long road, there lived an old woman who had forgotten her name.",
    "It was the third winter without snow, and the people of the valley had begun to talk about it in the evenings.",
    "He opened the letter.",
    "The lighthouse had been dark for eleven years when the new keeper arrived with two suitcases and a dog.",
    "Nobody in the town could say when the clock had stopped, or whether it had ever gone at all, but everybody agreed",
    "She counted the stairs again.",
    "In the museum's last room, behind a curtain that nobody remembered hanging, stood a machine with three handles.",
    "The river rose.",
    "My grandfather kept bees, and he said that they could tell an honest man by the way he stood, which is why I was "
    "never sent to fetch the honey until the summer in which everything else changed as well.",
)

PREAMBLES = {"code": CODE_PREAMBLE, "chat": CHAT_PREAMBLE, "json": JSON_PREAMBLE, "prose": PROSE_PREAMBLE}
KINDS = {"code": CODE, "chat": CHAT, "json": JSON, "prose": PROSE}


def prompts() -> list[str]:
    """Ten of each kind, the kinds interleaved."""
    return [PREAMBLES[kind] + texts[index] for index in range(10) for kind, texts in KINDS.items()]


def tiny_prompts(vocab_size: int, longest: int = 300) -> list[list[int]]:
    """The same prompts as ids of a small vocabulary, specials left out: each byte's remainder, from the end."""
    ordinary = vocab_size - 3
    return [[3 + byte % ordinary for byte in text.encode()][:longest] for text in prompts()]
