"""Where the training text of the embedded target comes from, and under which licence.

Only what documents were made of: `train.text` leaves out prompts that have no answer.
"""

SOURCES: dict[str, list[tuple[str, str]]] = {
    "t0": [
        (
            "training rows of T0 (Sanh et al., 2021) through yizhongw/self-instruct: "
            "adversarial_qa, common_gen, cosmos_qa, dbpedia_14, duorc, hotpotqa (KILT), qasc, "
            "quarel, quartz, quoref, ropes, wiki_bio, wiki_hop",
            "that of each source set: MIT, CC-BY, CC-BY-SA or BSD",
        )
    ],
    "gsm8k": [
        (
            "GSM8K, training split: openai/grade-school-math (Cobbe et al., 2021)",
            "MIT, copyright (c) 2021 OpenAI",
        )
    ],
    "code": [("Python 3.11 standard library, and functions cut out of it", "PSF-2.0")],
    "pydocs": [("Python 3.11 documentation", "PSF-2.0 (code in it also 0BSD)")],
    "sotu": [("State of the Union addresses", "public domain")],
    "sqlite": [("SQLite documentation", "public domain")],
    "novel": [("Herman Melville, *Moby-Dick*", "public domain")],
    "prompts": [
        ("MBPP, outside the test split: Austin et al., 2021, Google Research", "CC-BY-4.0"),
        (
            "Self-Instruct (yizhongw/self-instruct; Wang et al., 2022): seed tasks and "
            "user-oriented instructions",
            "Apache-2.0",
        ),
    ],
}
"""Kind of document (`train.text.KINDS`) -> (source, licence) of each of its sources."""
