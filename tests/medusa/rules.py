"""Rules by their names and numbers."""

from medusa.acceptance import build_rule
from medusa.sampling import SPECULATION, SamplingParams, Speculation


def make_rule(name=None, device="cpu", **settings):
    drafting = {key: value for key, value in settings.items() if key in SPECULATION}
    sampling = {key: value for key, value in settings.items() if key not in SPECULATION}
    return build_rule(SamplingParams(**sampling), Speculation(acceptance=name, **drafting), device)
