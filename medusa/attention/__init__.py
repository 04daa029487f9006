"""Tree attention: registered with transformers under one name, computed by a backend."""

from medusa.attention.base import AMBIENT, IMPLEMENTATION, TreePlan, register

__all__ = ["AMBIENT", "IMPLEMENTATION", "TreePlan", "register"]
