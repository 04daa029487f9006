"""The time of a decode step on this machine, which does not depend on values of weights."""
