"""Tree attention: registered with transformers under one name, computed by a backend."""

from medusa.attention.base import IMPLEMENTATION, TreePlan, register

__all__ = ["IMPLEMENTATION", "TreePlan", "register"]
