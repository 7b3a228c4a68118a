"""The state of a network's replicas, for users: how much they differ, and the precision they compute in."""

from ..trainer.parameters import replica_difference as replica_difference
from ..trainer.precision import precision_of as precision_of
