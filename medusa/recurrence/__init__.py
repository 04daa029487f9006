"""Recurrent layers over trees: gated delta rule, Mamba 2 and short convolutions, as hybrid models have them."""

from medusa.recurrence.hook import hook
from medusa.recurrence.states import RecurrentPass, RecurrentStates, StatesLostError

__all__ = ["RecurrentPass", "RecurrentStates", "StatesLostError", "hook"]
