"""The letters that name array dimensions, once for the whole project.

| letter | dimension | letter | dimension |
|---|---|---|---|
| B | sequences in a batch | T | tokens of a sequence |
| R | rows of one decode pass (pending token, drafted tokens, padding) | S | slots of a KV cache |
| D | model width | F | width of one routed expert |
| V | vocabulary | H | attention heads |
| L | decoder layers | E | routed experts of a layer |
| K | routed experts a token uses (top-k) | U | distinct experts used by the rows of a pass |
| N | drafted tokens of a round | | |

MLA adds C (rank of the KV latent), Q (rank of the query latent), P (rotary dimensions of a head),
M (non-rotary dimensions of a head) and W (value dimensions of a head).
"""

Pair = tuple[int, int]
"""A layer-expert (l, e): l counts decoder layers, dense ones included."""
