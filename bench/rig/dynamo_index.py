"""The peer: ai-dynamo-runtime's RadixTree with its block hashing, in a process of its own environment.

Runs without dynrt: reads pickled (command, argument) from stdin and answers on stdout. For a look-up, hashing the
token ids and asking are timed. Of an event, hashing its token ids and applying it are timed, each for itself, and
making its JSON is not.
"""

from __future__ import annotations

import gc
import json
import pickle
import sys
import time
from array import array

from dynamo.llm import RadixTree, compute_block_hash_for_seq


class Peer:
    """Block ids are the chain hashes that Dynamo's events name blocks by."""

    def __init__(self, block_size):
        self.tree = RadixTree()
        self.block_size = block_size
        self.next_event = 0

    def apply(self, events):
        """CPU seconds."""
        _, made = self._made(events)
        return timed(lambda: self._apply(made))[0]

    def look_up(self, prompts):
        """CPU seconds from lists of ids, and what each worker has of each."""
        lists = [as_list(prompt) for prompt in prompts]
        cpu_s, scores = timed(lambda: [self._find(ids) for ids in lists])
        return cpu_s, [by_worker(found) for found in scores]

    def serve(self, steps):
        """The same for look-ups with the events that follow each; and CPU seconds for hashing the events' ids."""
        hashing_s, made = self._made([event for _, events in steps for event in events])
        following = iter(made)
        batches = [(prompt, [next(following) for _ in events]) for prompt, events in steps]
        scores, listing_s = [], 0.0
        began = time.process_time()
        for prompt, events in batches:
            began_list = time.thread_time()
            ids = as_list(prompt)  # just before its use, as a request brings it
            listing_s += time.thread_time() - began_list
            scores.append(self._find(ids))
            self._apply_all(events)
        self._settle()
        cpu_s = time.process_time() - began - listing_s
        return cpu_s, hashing_s, [by_worker(found) for found in scores]

    def _find(self, ids):
        return self.tree.find_matches(compute_block_hash_for_seq(ids, self.block_size)).scores

    def _apply(self, events):
        self._apply_all(events)
        self._settle()

    def _apply_all(self, events):
        for worker, event in events:
            self.tree.apply_event(worker, event)

    def _settle(self):
        """Events are applied by a thread; whoever asks comes behind them."""
        self.tree.find_matches([1])

    def _made(self, events):
        """CPU seconds for hashing their token ids, and the events as the tree takes them."""
        lists = [as_list(tokens or b"") for _, _, _, tokens in events]
        cpu_s, hashes = timed(lambda: [compute_block_hash_for_seq(ids, self.block_size) for ids in lists])
        return cpu_s, [self._json(event, own) for event, own in zip(events, hashes, strict=True)]

    def _json(self, event, hashes):
        worker, parent, ids, tokens = event
        self.next_event += 1
        if tokens is None:
            data = {"removed": {"block_hashes": ids}}
        else:
            blocks = [{"block_hash": i, "tokens_hash": h} for i, h in zip(ids, hashes, strict=True)]
            data = {"stored": {"parent_hash": parent or None, "blocks": blocks}}
        message = {"event_id": self.next_event, "dp_rank": 0, "data": data}
        return worker, json.dumps(message, separators=(",", ":")).encode()


def as_list(tokens):
    return array("I", tokens).tolist()


def by_worker(scores):
    return {(key[0] if isinstance(key, tuple) else key): blocks for key, blocks in scores.items()}


def timed(run):
    """CPU seconds of the process, the tree's thread included, and the result."""
    began = time.process_time()
    result = run()
    return time.process_time() - began, result


def main():
    gc.disable()  # as the other side does
    peer = None
    while True:
        try:
            command, argument = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        if command == "new":
            peer, answer = Peer(argument), None
        else:
            answer = getattr(peer, command)(argument)
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
