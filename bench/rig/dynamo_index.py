"""The peer: ai-dynamo-runtime's RadixTree with its block hashing, in a process of its own environment.

Runs without dynrt: reads pickled (command, argument) from stdin and answers on stdout. What a client of the tree
has to do for a look-up (hashing token ids, asking) is timed; making events is not, applying them is.
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
        made = [self._event(*event) for event in events]
        return timed(lambda: self._apply(made))[0]

    def look_up(self, prompts):
        """CPU seconds from lists of ids, and what each worker has of each."""
        lists = [as_list(prompt) for prompt in prompts]
        cpu_s, scores = timed(lambda: [self._find(ids) for ids in lists])
        return cpu_s, [by_worker(found) for found in scores]

    def serve(self, steps):
        """The same for look-ups with the events that follow each."""
        made = [(as_list(prompt), [self._event(*event) for event in events]) for prompt, events in steps]

        def run():
            scores = []
            for ids, events in made:
                scores.append(self._find(ids))
                self._apply_all(events)
            self._settle()
            return scores

        cpu_s, scores = timed(run)
        return cpu_s, [by_worker(found) for found in scores]

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

    def _event(self, worker, parent, ids, tokens):
        self.next_event += 1
        if tokens is None:
            data = {"removed": {"block_hashes": ids}}
        else:
            hashes = compute_block_hash_for_seq(as_list(tokens), self.block_size)
            blocks = [{"block_hash": i, "tokens_hash": h} for i, h in zip(ids, hashes, strict=True)]
            data = {"stored": {"parent_hash": parent or None, "blocks": blocks}}
        event = {"event_id": self.next_event, "dp_rank": 0, "data": data}
        return worker, json.dumps(event, separators=(",", ":")).encode()


def as_list(tokens):
    return array("I", tokens).tolist()


def by_worker(scores):
    return {(key[0] if isinstance(key, tuple) else key): blocks for key, blocks in scores.items()}


def timed(run):
    """CPU seconds of the process, the tree's thread included, and the result."""
    gc.collect()
    gc.disable()
    began = time.process_time()
    result = run()
    cpu_s = time.process_time() - began
    gc.enable()
    return cpu_s, result


def main():
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
