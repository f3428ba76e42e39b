"""What a request may ask for: sampling parameters and host constraints."""

from photon_ext.sampling.constraints import Constraint, from_allowed_ids, from_callable, set_ids
from photon_ext.sampling.params import SamplingParams

__all__ = ["Constraint", "SamplingParams", "from_allowed_ids", "from_callable", "set_ids"]
