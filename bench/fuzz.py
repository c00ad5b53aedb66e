"""Arbitrary input for a stated time: bodies to every route, chats full of control tokens, tokens cut anyhow."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rig.random_model import write_random_model
from rig.report import at_least, at_most, finish, new_report
from rig.serve_command import serving_sim
from tokenizers import Tokenizer

from dynrt.engines.text import TextStream
from dynrt.runtime.http.operations import OPERATIONS
from dynrt.runtime.http.parameters.unsupported import CHAT, COMPLETIONS
from dynrt.runtime.messages import unpack_ids
from dynrt.runtime.prompts import PromptEncoder

try:
    from hypothesis import HealthCheck, given, seed, settings
    from hypothesis import strategies as st
except ImportError:
    sys.exit("fuzz: hypothesis is missing; run `bin/test fast` once, which installs what tests need")
from fuzz_inputs import chats, raw_bodies
from tiny_model import SPECIAL_TOKENS

EXAMPLES = 200  # between two looks at the clock
ANSWER_S = 30.0
POSTED = {path: operation for (method, path), operation in OPERATIONS.items() if method == "POST"}

Property = Callable[[st.DataObject], None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="for half a minute")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="N", help="how long (default: 10)")
    parser.add_argument("--seed", type=int, metavar="N", help="of the inputs (default: another each time)")
    arguments = parser.parse_args()
    minutes = 0.5 if arguments.quick else arguments.minutes
    first_seed = random.randrange(2**32) if arguments.seed is None else arguments.seed
    return asyncio.run(_bench(60 * minutes, first_seed, arguments.json))


async def _bench(limit_s: float, first_seed: int, as_json: bool) -> int:
    report = new_report("fuzz")
    with tempfile.TemporaryDirectory(prefix="dynrt-bench-") as directory:
        model = write_random_model(Path(directory), hidden=64, num_layers=2)
        async with serving_sim(model, "--speedup", 10_000) as server:
            properties = {
                "bodies": answers_as_documented(server.port),
                "chats": controlled_by_the_template(model),
                "texts": streamed_like_whole(model),
            }
            for name, holds in properties.items():
                found = await asyncio.to_thread(_fuzz, holds, limit_s / len(properties), first_seed)
                report.cases.append({"case": name, "seed": first_seed, **msgspec.structs.asdict(found)})
                report.bars.append(at_most(f"{name} that break the rule", found.failures, "", 0))
                report.bars.append(at_least(f"{name} tried", found.examples, "", EXAMPLES))
    return finish(report, as_json)


class Found(msgspec.Struct):
    """How often a property was tried, and how often in vain; of failures, what hypothesis says is on stderr."""

    examples: int = 0
    failures: int = 0


def _fuzz(holds: Property, limit_s: float, first_seed: int) -> Found:
    """Until the time is up, or an input is found that breaks the property."""
    found, until_s = Found(), time.monotonic() + limit_s

    @settings(max_examples=EXAMPLES, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def run(data: st.DataObject) -> None:
        found.examples += 1
        holds(data)

    for number in range(2**32):
        if time.monotonic() >= until_s or found.failures:
            break
        try:
            seed(first_seed + number)(run)()
        except Exception as error:  # any: it is what is looked for
            found.failures += 1
            print(
                f"fuzz: {type(error).__name__}: {error}",
                *getattr(error, "__notes__", ()),
                sep="\n",
                file=sys.stderr,
            )
    return found


# --- properties -------------------------------------------------------------------------------------


def answers_as_documented(port: int) -> Property:
    """No body that is posted to a route brings a status that /openapi.json does not name for it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)

    def holds(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(POSTED)))
        names = {*(POSTED[path].body or {}).get("properties", ()), *CHAT, *COMPLETIONS}
        body = data.draw(raw_bodies(names))
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        assert response.status in {200, *POSTED[path].errors}, answer
        assert response.status == 200 or msgspec.json.decode(answer)["error"]["message"]

    return holds


def controlled_by_the_template(model: Path) -> Property:
    """A chat has the control tokens of the same chat with harmless contents."""
    encoder = PromptEncoder.from_dir(model)

    def control_ids(chat: list[dict[str, Any]]) -> list[int]:
        return [i for i in unpack_ids(encoder.encode_chat(chat)) if i < len(SPECIAL_TOKENS)]

    def holds(data: st.DataObject) -> None:
        chat = data.draw(chats(SPECIAL_TOKENS))
        assert control_ids(chat) == control_ids([{**message, "content": "x"} for message in chat])

    return holds


def streamed_like_whole(model: Path) -> Property:
    """Tokens one by one make the text that they make at once, with what stops it; no stop string shows."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokens = st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=40)
    stops = st.lists(st.text(min_size=1, max_size=4), max_size=3)

    def holds(data: st.DataObject) -> None:
        prompt, output, stop = data.draw(tokens), data.draw(tokens), data.draw(stops)
        whole = tokenizer.decode(output)
        # One that is likely to come; what stands for a broken character at the very end is not searched.
        stop = [one for one in (*stop, whole[3:6]) if one and "\ufffd" not in one]
        streamed, at_once = (TextStream.resume(tokenizer, prompt, [], 0, stop=stop) for _ in range(2))
        text = "".join(streamed.push([i]).text for i in output) + streamed.finish()
        assert text == at_once.push(output).text + at_once.finish()
        assert streamed.stopped == at_once.stopped
        assert not any(one in text for one in stop)

    return holds


if __name__ == "__main__":
    sys.exit(main())
