"""What a run needs before its first step, stage by stage; wrong use shows in an early one, before what takes long."""

import logging
from dataclasses import dataclass, replace
from functools import partial

import torch

from data import resolve_base_name
from data.packing import PackedRows
from data.rows import open_rows
from data.sources import Source
from medusa.base.model import BaseModel
from medusa.base.taps import spread_layers
from medusa.heads import DraftHeads, HeadsConfig, build_heads
from medusa.loading.self_test import choose_decoding
from medusa.loading.separation import choose_separation
from train.config import BaseRecipe, Recipe
from train.draft_vocabulary import check_draft_vocabulary, most_frequent_tokens
from train.engine import Engine
from train.held_out import HeldOut, read_held_out
from train.jobs import Job, build_job
from train.number_format import slow_in_bfloat16
from train.quantised import load_options
from train.recipe_file import RecipeError, flatten, resolved
from train.run_directory import Position, RunDirectory
from train.schedule import total_steps
from train.workers import Workers

LOGGER = logging.getLogger("train")
PLACES = {"run", "base.name", "data.train", "data.heldout", "data.cache", "cache.directory"}
"""Recipe keys that each machine may have its own value of."""


@dataclass(frozen=True)
class Parts:
    """A run that is ready for its next step, seen from one process."""

    recipe: Recipe
    directory: RunDirectory
    workers: Workers
    base: BaseModel
    """Its traits are known, and the layers that heads read are tapped."""
    packed: PackedRows
    """Training rows."""
    heldout: HeldOut | None
    """None = the recipe names no held-out samples."""
    config: HeadsConfig
    """Of the heads that are trained."""
    job: Job
    engine: Engine
    """Around the job's module, in the state of the last checkpoint."""
    start: Position
    """Where the run stands."""


def set_up(recipe: Recipe, directory: RunDirectory, workers: Workers) -> Parts:
    """All stages, from the recipe to where the run directory stands; all processes call it.

    Raises:
        RecipeError: the run directory belongs to other samples, or the recipe does not fit the processes.
        ValueError, OSError: samples, base or checkpoint cannot be read.
    """
    _check_rows_per_step(recipe, workers)
    base = prepare_base(recipe, workers)
    packed = read_rows(recipe, base)
    _check_same(recipe, packed, workers)
    base = choose_separation(base, packed.input_ids[0].long(), workers.any)
    heldout = workers.from_first(partial(_read_heldout, recipe, base, packed))
    total = total_steps(recipe.optim, len(packed))
    heads = fresh_heads(recipe, base, packed, workers)
    job = build_job(recipe, base, heads, packed, workers, total, directory.path)
    autocast = recipe.engine.precision == "bfloat16" or (
        recipe.engine.precision == "auto" and base.dtype == torch.bfloat16
    )
    engine = Engine(job.module, recipe.optim, recipe.engine, workers.device, job.groups, autocast)
    start = _resume(recipe, directory, workers, engine, Position(0, total, 0.0, packed.fingerprint()))
    job.prepare()
    return Parts(recipe, directory, workers, base, packed, heldout, heads.config, job, engine, start)


def prepare_base(recipe: Recipe, workers: Workers) -> BaseModel:
    """The base, tried out, with the layers tapped that heads read."""
    base = load_base(str(resolve_base_name(recipe.base.name)), recipe.base, workers)
    base = choose_decoding(base)  # heads of a base that verifies nothing are of no use
    base = base.tapped(spread_layers(recipe.heads.feature_layers, base.num_layers))
    check_draft_vocabulary(recipe.heads.draft_vocab, base.vocab_size)
    return base


def load_base(name: str, base: BaseRecipe, workers: Workers) -> BaseModel:
    """The base as it is stored, whole or divided among the processes."""
    device = workers.device
    dtype = None if base.dtype == "auto" else getattr(torch, base.dtype)
    if dtype is None and workers.from_first(partial(slow_in_bfloat16, device)):
        dtype = torch.float32
    if not base.shard:
        return BaseModel.load(name, dtype=dtype, device=device, load_options=load_options(base, device))
    from train.sharded_base import load_sharded

    LOGGER.info("base is divided among the processes: held-out tokens per step are left out, as decoding may part them")
    return load_sharded(name, dtype, device)


def read_rows(recipe: Recipe, base: BaseModel) -> PackedRows:
    """The training samples, packed."""
    data = recipe.data
    source = Source(data.train, data.train_split, data.subset, data.streaming, data.limit)
    packed = open_rows(source, base.tokenizer, data.row_tokens, data.cache)
    LOGGER.info("%d rows of %d tokens, %.1f %% filled", len(packed), data.row_tokens, 100 * packed.fill)
    return packed


def fresh_heads(recipe: Recipe, base: BaseModel, packed: PackedRows, workers: Workers) -> DraftHeads:
    """Heads of the recipe's shape before their first step; the seed decides their weights."""
    torch.manual_seed(recipe.optim.seed)
    shape = recipe.heads
    heads = build_heads(
        HeadsConfig(
            hidden_size=base.hidden_size,
            vocab_size=base.vocab_size,
            num_heads=shape.num_heads,
            num_layers=shape.num_layers,
            own_lm_heads=shape.own_lm_heads,
            base=str(resolve_base_name(recipe.base.name)),
            base_source=base.source,
            architecture=shape.architecture,
            feature_layers=base.feature_layers,
            rank=shape.rank,
            draft_vocab_size=shape.draft_vocab,
        )
    )
    if heads.draft_ids is not None:
        heads.draft_ids.copy_(most_frequent_tokens(packed, len(heads.draft_ids), base.vocab_size, workers))
    heads.init_from_base(base.lm_head_weight)
    return heads


def _read_heldout(recipe: Recipe, base: BaseModel, packed: PackedRows) -> HeldOut | None:
    data, options = recipe.data, recipe.evaluate
    if not data.heldout:
        return None
    longest = max(1, base.context_length - options.max_new_tokens)
    return read_held_out(data, options, base.tokenizer, packed, longest)


def _resume(recipe: Recipe, directory: RunDirectory, workers: Workers, engine: Engine, fresh: Position) -> Position:
    """Bring the engine to the last checkpoint; returns where that is, or ``fresh`` where there is none."""
    position = workers.from_first(directory.position)
    if position is None:
        return fresh
    if position.data != fresh.data:
        raise RecipeError(
            f"data.train ({recipe.data.train}) holds other samples than at the start of the run "
            f"({recipe.run}); restore the file or give another directory (--recipe.run DIR)"
        )
    engine.load_state(directory.tensors(position) if workers.rank == 0 else {})
    LOGGER.info("resumed at step %d of %d", position.step, fresh.total)
    return replace(position, total=fresh.total)


def _check_rows_per_step(recipe: Recipe, workers: Workers) -> None:
    if recipe.optim.rows_per_step < workers.world_size:
        raise RecipeError(
            f"optim.rows_per_step ({recipe.optim.rows_per_step}) leaves some of the processes ({workers.world_size}) "
            "without a row; raise it or start fewer processes"
        )


def _check_same(recipe: Recipe, packed: PackedRows, workers: Workers) -> None:
    """Refuse processes that would wait for each other in vain, or train on different samples."""
    ours = {key: value for key, value in flatten(resolved(recipe)) if key not in PLACES}
    ours["data.train"] = f"fingerprint {packed.fingerprint()}"
    theirs = workers.from_first(lambda: ours)
    odd = [f"{key} is {ours[key]} here, {theirs[key]} there" for key in ours if ours[key] != theirs[key]]
    if workers.total(torch.tensor(len(odd))):
        named = "; ".join(odd) or "its machine says what"
        raise RecipeError(
            f"processes have different recipes or samples (process {workers.rank} beside process 0: {named}); give all "
            "machines the same ones"
        )
