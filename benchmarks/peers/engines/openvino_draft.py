"""``openvino_draft.py DRAFT TARGET``: converts an EAGLE-3 draft for OpenVINO GenAI; runs in OpenVINO's environment.

``optimum-cli export openvino`` converts the same draft, but it needs trusted remote code, which requires unneeded
packages, and it leaves out the numbers of the layers that the draft reads.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import openvino
from optimum.exporters.openvino.convert import export_from_model
from optimum.exporters.openvino.model_patcher import LlamaEagle3ForCausalLM, LlamaEagle3Model

NAME = "openvino_model.xml"


def convert(draft: Path, target: Path) -> None:
    """Write the graph, with weights in float16, and the layers of the base that it reads (counted from 0)."""
    for each in (LlamaEagle3ForCausalLM, LlamaEagle3Model):
        each.__module__ = "transformers.models.llama"  # the exporter finds the library by this name
    model = LlamaEagle3ForCausalLM.from_pretrained(draft, dtype="float32")
    layers = json.loads((draft / "config.json").read_text())["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    with TemporaryDirectory(dir=target.parent) as there:
        export_from_model(model, there, task="text-generation-with-past", stateful=True)
        graph = openvino.Core().read_model(Path(there) / NAME)
        graph.set_rt_info(layers, "hidden_layers_list")
        target.mkdir()
        openvino.save_model(graph, target / NAME, compress_to_fp16=True)


if __name__ == "__main__":
    convert(*map(Path, sys.argv[1:]))
