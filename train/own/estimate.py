"""From measurements to a plan: the number of answers, the passes over them, and the time of each stage."""

from medusa.train.own.asked import CHAT, OWN_SHARE, TEXT, TEXT_SETTINGS
from medusa.train.own.measure import Measured
from medusa.train.own.plan import HELD_OUT_SHARE, STAGES, Asked, Costs, Plan, divide, held_out
from medusa.train.own.settings import Values, cache_values, state_bytes

SPARE = 1.05
"""Number of prompts that are begun for each needed one, since some will be equal."""
TAIL, FILES = 0.25, 3
"""Time of a file's last answers, decoded with few others, as a share of a longest answer's; number of files."""
COMPARED_SHARE, FEWEST_COMPARED, MOST_COMPARED = 0.03, 4, 16
"""Share of the time for decoding held-out prompts at the end; and the bounds of their number."""
COMPARED_TOKENS, DECODINGS = 64, 6
"""New tokens of each; and how often each is decoded at most: twice by the evaluation, then in four ways."""
EVALUATED_ROWS = 64
"""Most held-out rows that the evaluation reads (`evaluate.rows`)."""
CHECKPOINT_SECONDS, FEWEST_STEPS, MOST_STEPS = 60.0, 10, 500
"""Seconds between checkpoints, and bounds in steps."""


def make_plan(asked: Asked, measured: Measured, spent: float, free: float) -> Plan:
    """The plan for a budget of time.

    Args:
        asked: the user's request.
        measured: the measurements.
        spent: seconds that have passed already.
        free: free bytes of the disk.

    Raises:
        ValueError: the time is too short.
    """
    facts, budget = measured.facts, 3600 * asked.hours
    one = COMPARED_TOKENS * measured.alone.token * DECODINGS
    compared = min(MOST_COMPARED, held_out(measured.most), max(FEWEST_COMPARED, int(COMPARED_SHARE * budget / one)))
    itemsize = 4 if measured.shape["base.dtype"] == "float32" else 2
    per_position = state_bytes(facts, measured.shape, itemsize)
    costs = _costs(measured, compared)
    conversations, epochs = divide(budget - spent, costs, measured.most)
    states = conversations * _positions(measured) * per_position
    cache = cache_values(states, free, facts)
    if cache["cache.mode"] == "online":  # each pass over the answers is also a pass of the base
        costs, states = costs._replace(later=costs.first), 0.0
        conversations, epochs = divide(budget - spent, costs, measured.most)
    heldout = held_out(conversations)
    compared = min(compared, heldout)
    return Plan(
        asked=asked,
        kind=measured.kind,
        written=_written(measured, conversations + heldout),
        conversations=conversations,
        heldout=heldout,
        dtype=measured.dtype,
        answer_tokens=facts.answer_tokens,
        compared=compared,
        state_bytes=states,
        reading=conversations * (costs.first - costs.later),
        seconds={stage: costs.of(conversations, epochs, stage) for stage in STAGES},
        recipe={**measured.shape, "optim.epochs": float(epochs), **cache, **_ends(measured, compared)},
    )


def _costs(measured: Measured, compared: int) -> Costs:
    """Costs of the whole plan, with hidden states on disk."""
    answers, training, facts, turns = measured.answers, measured.training, measured.facts, measured.turns
    row = measured.shape["data.row_tokens"]
    both = 1 + HELD_OUT_SHARE  # held-out prompts are written and answered too
    reading = turns * (answers.prompt_tokens + answers.length) * training.row_token / facts.devices
    learning = _positions(measured) * training.position / facts.devices
    decoding = compared * COMPARED_TOKENS * measured.alone.token
    return Costs(
        prompt=both * _prompt_seconds(measured),
        answer=both * turns * answers.seconds,
        first=reading + learning,
        later=learning,
        fixed={
            "prompts": 0.0 if measured.given else measured.loading,
            "answers": FILES * TAIL * facts.answer_tokens * answers.together * answers.token,
            # A child imports and loads twice as much: torchrun, then DeepSpeed.
            "training": 2 * measured.loading + 2 * decoding + EVALUATED_ROWS * row * training.row_token,
            "comparison": measured.loading + (DECODINGS - 2) * decoding,
        },
    )


def _positions(measured: Measured) -> float:
    """Trained positions of a conversation, on average."""
    return measured.turns * measured.answers.length


def _prompt_seconds(measured: Measured) -> float:
    """Average seconds to write one more prompt."""
    if measured.kind == TEXT:
        return SPARE * TEXT_SETTINGS.max_new_tokens * measured.answers.token
    own = measured.prompts
    return OWN_SHARE * SPARE * own.seconds / own.ends if own else 0.0


def _written(measured: Measured, needed: int) -> int:
    """Number of prompts that the base begins to write for this number of conversations."""
    if measured.kind == TEXT:
        return round(SPARE * needed)
    own = measured.prompts
    return round(OWN_SHARE * SPARE * needed / own.ends) if own and measured.kind == CHAT else 0


def _ends(measured: Measured, compared: int) -> Values:
    """Recipe values of evaluation and checkpoints."""
    answers, gpu = measured.answers, measured.facts.device == "cuda"
    tokens = measured.shape["optim.rows_per_step"] * measured.shape["data.row_tokens"]
    share = answers.length / (answers.prompt_tokens + answers.length)
    step = tokens * share * measured.training.position / measured.facts.devices
    return {
        "evaluate.prompts": compared,
        "evaluate.max_new_tokens": COMPARED_TOKENS,
        "evaluate.nodes": 64 if gpu else 16,
        "log.checkpoint_steps": min(MOST_STEPS, max(FEWEST_STEPS, int(CHECKPOINT_SECONDS / step))),
    }
