"""Makes the explanation of one request for text: it finds the causes, and stores what the caller's key may see."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvarn.chats.answer import Reader
from kvarn.engine.explain import Explanation, to_json, without_texts
from kvarn.server.access import Caller
from kvarn.server.causes import Asked, differs
from kvarn.server.outlines import NO_CHATS, Earlier, Outline
from kvarn.server.parse import Call
from kvarn.server.prompts import Prompts
from kvarn.server.records import Records

log = logging.getLogger("kvarn")
SECONDS = 2.0  # an answer does not wait longer for the causes of its misses
MOST = 4  # prompts of a request whose causes are looked for
Explained = tuple[Explanation, Sequence[int]]  # of a prompt, with its tokens


class Explaining:
    """`outline`: of a chat."""

    def __init__(self, records: Records, caller: Caller, prompts: Prompts, call: Call, outline: Outline | None) -> None:
        self._records = records
        self._caller = caller
        self._prompts = prompts
        self._call = call
        self._outline = outline

    async def causes(self, prompts: Sequence[Explained]) -> list[Explanation]:
        """The explanations with the causes of their misses: of the first few, as far as they are found in time."""
        found = [e for e, _ in prompts]
        missed = [i for i, e in enumerate(found) if differs(e)]
        try:
            async with asyncio.timeout(SECONDS):
                for i in missed[:MOST]:
                    found[i] = await self._with_cause(*prompts[i])
        except Exception as error:  # noqa: BLE001 (the answer is right without it)
            log.warning("the cause of a cache miss was not found (%s)", type(error).__name__)
        return found

    def store(
        self, head: dict[str, Any], found: Sequence[Explanation], answer: Reader | None, n_tokens: int
    ) -> dict[str, Any]:
        """The object for the answer. What is stored may have less text. `head`: ids and names. `n_tokens`: of the
        answer."""
        each = [to_json(self._quotable(e), self._prompts.spell) for e in found]
        kept = each if self._caller.keeps_text else [without_texts(prompt) for prompt in each]
        told, stored = ({**head, **(ps[0] if len(ps) == 1 else {"prompts": ps})} for ps in (each, kept))
        if self._call.kept and not self._caller.keeps_text:
            stored["id"] = f"{head['id'][:12]}..."  # who knows all of it may read the answer
        outline = self._outline
        if outline is not None:
            outline = outline if answer is None else outline.answered(answer)
            outline = outline._replace(n_tokens=sum(e.prompt for e in found) + n_tokens)
        self._records.add(head["id"], self._caller.owner, stored, head["request_id"], outline)
        return told

    async def _with_cause(self, e: Explanation, tokens: Sequence[int]) -> Explanation:
        """On a thread that the engine does not need."""
        asked = Asked(tokens, self._call.talk, self._earlier(), self._caller.quotes)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._prompts.threads, self._prompts.causes.find, e, asked)

    def _earlier(self) -> Earlier:
        if self._outline is None:
            return NO_CHATS
        return Earlier(self._outline, self._records.outlines(self._caller.owner, self._outline.salt))

    def _quotable(self, e: Explanation) -> Explanation:
        """Without the tokens of the earlier text, if the caller may not see them."""
        if self._caller.quotes or e.limit is None:
            return e
        return replace(e, limit=e.limit._replace(theirs=None, onward=()))
