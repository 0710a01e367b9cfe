"""The centre of a layer's keys, from the bias of K.

Softmax does not change when the same vector c is subtracted from every key of a head: all scores of a
query q move by q.c. Qwen2 and Qwen2.5 have biases of K that are many times larger than the rest of a
key, and cells of few bits spend their precision on it. Rope rotates the bias with the position, but its
large numbers are in pairs that hardly turn. So the unrotated bias in these pairs is almost the same in
every key, and it is the centre. In the other pairs, and past rope.dim, the centre is 0.

A centre is wrong where scores do more than enter one softmax: soft caps, and sinks that are logits.
Values have no centre: the first token's value is near 0, and would get the error of the centre.
"""

import numpy as np
from numpy.typing import NDArray

from kvarn.graph.ops import Centre
from kvarn.graph.record import Graph
from kvarn.models.rope import frequencies, magnitude

MOST_TURNED = 1.0  # radians, over the context that the model was trained for


def centre_vector(centre: Centre, bias: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """bias [heads * dim] -> [heads * dim]. Keys have YaRN's magnitude, so the centre has it too."""
    half, slow = centre.rope.dim // 2, _slow_pairs(centre)
    kept = np.zeros((heads, bias.size // heads), np.float64)
    for start in (0, half):
        kept[:, start : start + half] = np.where(slow, bias.reshape(heads, -1)[:, start : start + half], 0.0)
    return (kept * magnitude(centre.rope)).astype(np.float32).ravel()


def _slow_pairs(centre: Centre) -> NDArray[np.bool_]:  # [rope.dim / 2]
    return frequencies(centre.rope) * centre.context <= MOST_TURNED


def uncentred_layers(graph: Graph) -> list[int]:
    """Layers whose keys have a bias that no centre takes out: there is none, or none of its pairs hardly turns."""
    return [node.settings[0] for node in graph.nodes if node.op == "attention" and _uncentred(graph, node.inputs[1].id)]


def _uncentred(graph: Graph, key: int) -> bool:
    known = False
    while (node := graph.nodes[key]).op in ("rope", "rms_norm", "centred"):
        if node.op == "centred":
            known = bool(_slow_pairs(node.settings[1]).any())
        key = node.inputs[0].id
    return node.op == "linear" and len(node.weights) == 2 and not known
