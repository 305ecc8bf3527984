from __future__ import annotations

import json

from trtforge.engine_proof import layer_types


def test_layers_are_counted_by_what_they_write():
    def layer(*types):
        tensors = [{"Name": str(place), "Format/Datatype": text} for place, text in enumerate(types)]
        return {"Name": "l", "LayerType": "k", "Inputs": [], "Outputs": tensors}

    half, single = "Row major linear FP16 format", "Row major linear FP32"
    text = json.dumps({"Layers": [layer(half), layer(single, half), layer(half), layer(), "name only"]})

    assert layer_types(text) == {"float16": 2, "unknown": 2, "float32": 1}
