"""Points, boxes and outlines of what an image shows: thin over `submit` with a skill."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from photon_ext.checks import is_array
from photon_ext.engine.request_options import RequestOptions
from photon_ext.errors import ConfigError, RequestError, shown

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from photon_ext.engine.output import Output
    from photon_ext.engine.prompts import Prompt
    from photon_ext.engine.request import Progress
    from photon_ext.engine.request_options import RequestKeywords
    from photon_ext.models.region import RegionConfig
    from photon_ext.sampling import SamplingParams


class SpatialSkills:
    """What an engine whose model has region heads can find in an image.

    The prompt is the model's begin-of-text token if it uses one, the image, and the text of
    `RegionConfig.prompts`; other prompts go to `Engine.submit(prompt, skill=...)`.
    """

    region: RegionConfig | None

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Prompt] | Iterator[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raw: bool = False,
        n: int = 1,
        progress: Progress | None = None,
        **options: Unpack[RequestKeywords],
    ) -> list[Output]: ...

    @abstractmethod
    def encode_image(self, image: Any) -> Any: ...

    def point(
        self,
        image: Any,
        text: str | Sequence[int],
        params: SamplingParams | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Output:
        """Where things are: `Output.objects` holds a Point of each.

        Args:
            image: as `encode_image` takes it, or embeddings, [n, hidden].
            text: what to look for; or token ids, of the whole text behind the image.
            params: of the text head, which says where the answer ends; None: the defaults.
            options: max_objects, and those of `generate`.

        Raises: as `generate`; RequestError: the model has no region heads; ConfigError: `n`, `raw`
            or another skill is given.
        """
        return self._locate("point", image, text, params, options)

    def detect(
        self,
        image: Any,
        text: str | Sequence[int],
        params: SamplingParams | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Output:
        """The same with a Box of each."""
        return self._locate("detect", image, text, params, options)

    def segment(
        self,
        image: Any,
        text: str | Sequence[int],
        params: SamplingParams | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Output:
        """The outline of a thing: its corners, in order, as Points."""
        return self._locate("segment", image, text, params, options)

    def _locate(
        self,
        skill: str,
        image: Any,
        text: str | Sequence[int],
        params: SamplingParams | None,
        options: RequestKeywords,
    ) -> Output:
        if self.region is None:
            raise RequestError(
                f"{skill} needs region heads, and this engine's model has none; make it with "
                "region="
            )
        if options.get("skill", skill) != skill:
            raise ConfigError(
                f"skill is {shown(options['skill'])}, and this is {skill}(); leave it out, or give "
                "it to submit()"
            )
        asked: RequestKeywords = {**options, "skill": skill}
        RequestOptions.of(**asked)  # before an image is encoded; `generate` takes more than these
        is_embeds = is_array(image) and "float" in str(image.dtype) and image.ndim != 3
        embeds = image if is_embeds else self.encode_image(image)
        parts: list[Any] = [embeds, text]
        if isinstance(text, str):
            parts = ["", embeds, self.region.prompts[skill].replace("{}", text)]
        return self.generate([{"prompt_embeds": parts}], params, **asked)[0]
