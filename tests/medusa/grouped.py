"""Layers as GPTQ, AWQ and compressed-tensors store them, of any numbers, and their weights by definition."""

import numpy as np
import torch


def scheme(bits=4, size=128, symmetric=True, **more):
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": size}
    weights |= {"strategy": "channel", "group_size": None} if size < 0 else {}
    return {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights} | more},
        "format": "pack-quantized",
    }


CASES = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "gptq in another order": {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True},
    "gptq v2, 8 bits": {"quant_method": "gptq", "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
    "gptq, small groups": {"quant_method": "gptq", "bits": 4, "group_size": 16},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"},
    "w4a16": {"quant_method": "compressed-tensors"} | scheme(),
    "w4a16, asymmetric": {"quant_method": "compressed-tensors"} | scheme(size=32, symmetric=False),
    "w4a16 in another order": {"quant_method": "compressed-tensors"} | scheme(actorder="group"),
    "w8a16": {"quant_method": "compressed-tensors"} | scheme(8, -1),
    "w8a16, asymmetric": {"quant_method": "compressed-tensors"} | scheme(8, symmetric=False),
}
EXPANDED = {
    "gptq in another order",
    "gptq v2, 8 bits",
    "gptq, small groups",
    "w4a16 in another order",
    "w8a16, asymmetric",
}
"""What the kernels do not know."""


def words(*shape):
    return torch.from_numpy(np.random.default_rng(sum(shape)).integers(-(2**31), 2**31, shape, dtype=np.int32))


def scales(*shape, dtype=torch.float16):
    return (0.004 * (1 + torch.rand(shape))).to(dtype)


def layer(case, outputs, inputs):
    """The tensors of a layer with any numbers."""
    told, name = CASES[case], case.split()[0]
    if name == "awq":
        groups = inputs // told["group_size"]
        shapes = {"qweight": (inputs, outputs // 8), "qzeros": (groups, outputs // 8)}
        return {own: words(*shape) for own, shape in shapes.items()} | {"scales": scales(groups, outputs)}
    if name.startswith("gptq"):
        each, size = 32 // told["bits"], told["group_size"] if told["group_size"] > 0 else inputs
        order = torch.arange(inputs, dtype=torch.int32) // size
        return {
            "qweight": words(inputs // each, outputs),
            "qzeros": words(inputs // size, outputs // each) & 0x77777777,
            "scales": scales(inputs // size, outputs),
            "g_idx": order[torch.randperm(inputs)] if told.get("desc_act") else order,
        }
    weights = told["config_groups"]["group_0"]["weights"]
    each, groups = 32 // weights["num_bits"], inputs // (weights["group_size"] or inputs)
    tensors = {
        "weight_packed": words(outputs, inputs // each),
        "weight_scale": scales(outputs, groups, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    if not weights["symmetric"]:
        tensors["weight_zero_point"] = words(outputs // each, groups)
    if "order" in case:
        tensors["weight_g_idx"] = torch.randperm(inputs).int() // weights["group_size"]
    return tensors


def defined(case, tensors, outputs, inputs):
    """float32 [O, I], each weight by the definition of the format."""
    told, name = CASES[case], case.split()[0]
    arrays = {own: one.float().numpy() if one.is_floating_point() else one.numpy() for own, one in tensors.items()}
    o, i = np.arange(outputs)[:, None], np.arange(inputs)[None]

    def field(own, row, column, place, bits):
        return arrays[own].view(np.uint32)[row, column] >> (bits * place).astype(np.uint32) & (2**bits - 1)

    if name == "awq":
        place, g = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])[o % 8], i // told["group_size"]
        q, zero = field("qweight", i, o // 8, place, 4), field("qzeros", g, o // 8, place, 4)
        scale = arrays["scales"][g, o]
    elif name.startswith("gptq"):
        bits, each, g = told["bits"], 32 // told["bits"], arrays["g_idx"][i]
        q, zero = field("qweight", i // each, o, i % each, bits), field("qzeros", g, o // each, o % each, bits)
        zero = zero + (told.get("checkpoint_format") != "gptq_v2")
        scale = arrays["scales"][g, o]
    else:
        weights = told["config_groups"]["group_0"]["weights"]
        bits = weights["num_bits"]
        each, g = 32 // bits, i // (weights["group_size"] or inputs)
        g = arrays["weight_g_idx"][i] if "weight_g_idx" in arrays else g
        q = field("weight_packed", o, i // each, i % each, bits).astype(np.int64) - 2 ** (bits - 1)
        zero = 0
        if "weight_zero_point" in arrays:
            zero = field("weight_zero_point", o // each, g, o % each, bits).astype(np.int64) - 2 ** (bits - 1)
        scale = arrays["weight_scale"][o, g]
    return torch.from_numpy((np.int64(q) - np.int64(zero)).astype(np.float32) * scale)
