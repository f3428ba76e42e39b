"""Spatial skills: answers that are points or boxes in an image, instead of text.

Such a row makes values in turn, one a step: x and y of a point; x, y and size of a box. Where an
object is complete, the text head decides on the device: a stop token ends the answer, any other
begins the next object. So the row runs ahead like plain text. Its values are ids behind the
vocabulary (`ops.spatial_features_into`), and a row that was preempted is fed them again. Values are
always the likeliest; temperature and its like count for the text head alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from photon_ext.checks import check_count
from photon_ext.errors import ConfigError, RequestError, shown
from photon_ext.sampling.params import SamplingParams

DEFAULT_MAX_OBJECTS, MOST_OBJECTS = 150, 2**20
# values of an object; the corners of one outline, in order, are points
SKILLS = {"point": 2, "detect": 3, "segment": 2}


class Point(NamedTuple):
    """From 0, the left or upper edge, to 1."""

    x: float
    y: float


class Box(NamedTuple):
    """Its edges, from 0, the left or upper edge of the image, to 1."""

    x_min: float
    y_min: float
    x_max: float
    y_max: float


Objects: TypeAlias = "tuple[Point, ...] | tuple[Box, ...]"


class Skill(NamedTuple):
    """What a request asks for, checked.

    Attributes:
        name: "point", "detect" or "segment".
        max_objects: more are not made; of an outline, corners.
    """

    name: str
    max_objects: int

    @classmethod
    def of(cls, name: object, max_objects: object) -> Skill | None:
        """None: the answer is text. Raises ConfigError."""
        if name is None:
            if max_objects is not None:
                raise ConfigError("max_objects is given without a skill; give skill='point'")
            return None
        if not isinstance(name, str) or name not in SKILLS:
            known = ", ".join(map(repr, SKILLS))
            raise ConfigError(f"skill is {shown(name)}; give one of {known}, or None for text")
        most = DEFAULT_MAX_OBJECTS if max_objects is None else max_objects
        return cls(name, check_count("max_objects", most, MOST_OBJECTS))

    @property
    def values(self) -> int:
        """How many make an object."""
        return SKILLS[self.name]

    def run_with(self, params: SamplingParams) -> SamplingParams:
        """What the row is run with; its cap follows from `max_objects`. Raises ConfigError: the
        parameters ask for what only text has.
        """
        text_only = {
            "stop": params.stop,
            "constraint": params.constrained,
            "logprobs": params.logprobs is not None,
        }
        for name, asked in text_only.items():
            if asked:
                raise ConfigError(
                    f"skill is {self.name!r}, and {name} is of text: leave one of them out"
                )
        cap = self.values * self.max_objects
        shortest = min(params.min_tokens, cap)
        return replace(params, object_values=self.values, max_new_tokens=cap, min_tokens=shortest)


class ObjectReader(NamedTuple):
    """Reads objects from the tokens of an answer."""

    skill: Skill
    vocab: int
    bins: int

    @classmethod
    def of(cls, skill: Skill | None, vocab: int, bins: int) -> ObjectReader | None:
        """None: the answer is text. Raises RequestError: the model has no region heads."""
        if skill is None:
            return None
        if not bins:
            raise RequestError(
                f"skill is {skill.name!r}, and this engine's model has no region heads; make it "
                "with region="
            )
        return cls(skill, vocab, bins)

    def read(self, tokens: Sequence[int]) -> Objects:
        """The objects that are complete."""
        values = [token - self.vocab for token in tokens if token >= self.vocab]
        count = self.skill.values
        whole = range(0, len(values) - count + 1, count)
        points = [Point(values[i] / self.bins, values[i + 1] / self.bins) for i in whole]
        if count == 2:
            return tuple(points)
        sizes = [divmod(values[i + 2] - self.bins, self.bins) for i in whole]
        return tuple(map(self._box, points, sizes))

    def _box(self, middle: Point, size: tuple[int, int]) -> Box:
        w, h = (2 ** (10 * side / (self.bins - 1) - 10) / 2 for side in size)
        edges = middle.x - w, middle.y - h, middle.x + w, middle.y + h
        return Box(*(min(max(edge, 0.0), 1.0) for edge in edges))
