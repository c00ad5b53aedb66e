"""The radix tree's edges: split where paths part, grown and cut in place, holders counted per block."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from dynrt.planner.edge import Edge
from dynrt.planner.index_memory import IndexMemory
from dynrt.planner.radix_tree import RadixTree

A, B = 1, 2
BLOCK = b"0123"  # one token is one block here


def path(*blocks: int) -> bytes:
    return b"".join(block.to_bytes(4, "little") for block in blocks)


def new_tree() -> RadixTree:
    return RadixTree("", len(BLOCK), IndexMemory())


def edges(tree: RadixTree) -> list[Edge]:
    def below(edge: Edge) -> Iterator[Edge]:
        for child in (edge.children or {}).values():
            yield child
            yield from below(child)

    return list(below(tree.root))


def test_paths_that_part_share_the_edge_above() -> None:
    tree = new_tree()
    tree.insert(tree.root, 0, path(1, 2, 3, 4), A)
    tree.insert(tree.root, 0, path(1, 2, 5), B)
    assert sorted(edge.length for edge in edges(tree)) == [1, 2, 2]
    assert tree.match(path(1, 2, 3, 4)) == [(2, B), (4, A)]
    assert tree.match(path(1, 2, 5, 9)) == [(2, A), (3, B)]


def test_equal_beginnings_of_tokens_do_not_match_blocks() -> None:
    tree = RadixTree("", 8, IndexMemory())
    tree.insert(tree.root, 0, path(1, 2, 3, 4), A)
    assert tree.match(path(1, 2, 3, 9)) == [(1, A)]
    assert tree.match(path(1, 9, 3, 4)) == []
    assert tree.match(path(1, 2, 3)) == [(1, A)]


def test_a_second_holder_of_a_part_does_not_cut_the_edge() -> None:
    tree = new_tree()
    tree.insert(tree.root, 0, path(*range(1, 9)), A)
    tree.insert(tree.root, 0, path(1, 2, 3), B)
    assert len(edges(tree)) == 1
    assert tree.match(path(*range(1, 9))) == [(3, B), (8, A)]


def test_a_holder_of_a_part_gets_no_further_than_the_prompt_goes() -> None:
    tree = new_tree()
    tree.insert(tree.root, 0, path(1, 2, 3, 4, 5), A)
    tree.insert(tree.root, 0, path(1, 2, 3, 4), B)
    assert tree.match(path(1, 2, 9)) == [(2, A), (2, B)]


def test_a_leaf_of_one_holder_grows_in_place() -> None:
    tree = new_tree()
    edge = tree.insert(tree.root, 0, path(1, 2), A)
    assert tree.insert(edge, 2, path(3, 4), A) is edge
    assert tree.match(path(1, 2, 3, 4)) == [(4, A)]


def test_a_block_repeated_in_a_prompt_is_two_places() -> None:
    tree = new_tree()
    tree.insert(tree.root, 0, path(*[7] * 8), A)
    assert tree.match(path(*[7] * 20)) == [(8, A)]


def test_a_place_remembered_before_a_split_is_still_found() -> None:
    tree = new_tree()
    bottom = tree.insert(tree.root, 0, path(1, 2, 3, 4), A)
    tree.insert(tree.root, 0, path(1, 9), B)
    tree.insert(tree.root, 0, path(1, 2, 9), B)
    tree.drop(bottom, 0, 0b1111, A)
    assert tree.match(path(1, 2, 3, 4)) == [(2, B)]


def test_a_split_divides_what_is_held_in_part() -> None:
    tree = new_tree()
    tree.insert(tree.root, 0, path(1, 2, 3, 4, 5), A)
    tree.insert(tree.root, 0, path(1, 2, 3), B)
    tree.insert(tree.root, 0, path(1, 2, 9), A)
    assert tree.match(path(1, 2, 3, 4, 5)) == [(2, B), (3, B), (5, A)]
    assert tree.match(path(1, 2, 9)) == [(2, B), (3, A)]


def test_a_split_divides_what_is_held_twice() -> None:
    tree = new_tree()
    bottom = tree.insert(tree.root, 0, path(1, 2, 3, 4), A)
    tree.insert(tree.root, 0, path(1, 2, 3, 4), A)
    tree.insert(tree.root, 0, path(1, 2, 9), B)
    tree.drop(bottom, 0, 0b1111, A)
    assert tree.match(path(1, 2, 3, 4)) == [(2, B), (4, A)]
    tree.drop(bottom, 0, 0b1111, A)
    assert tree.match(path(1, 2, 3, 4)) == [(2, B)]


def test_a_block_held_twice_must_be_dropped_twice() -> None:
    tree = new_tree()
    edge = tree.insert(tree.root, 0, path(1, 2), A)
    tree.insert(tree.root, 0, path(1, 2, 3), A)
    tree.drop(edge, 0, 0b11, A)
    assert tree.match(path(1, 2)) == [(2, A)]
    tree.drop(edge, 0, 0b11, A)
    assert tree.match(path(1, 2)) == []


def test_a_hole_ends_the_match() -> None:
    tree = new_tree()
    edge = tree.insert(tree.root, 0, path(1, 2, 3, 4), A)
    tree.drop(edge, 0, 0b0100, A)
    assert tree.match(path(1, 2, 3, 4)) == [(2, A)]


def test_the_end_of_a_leaf_that_nobody_holds_is_given_back() -> None:
    tree = new_tree()
    edge = tree.insert(tree.root, 0, path(*range(1, 101)), A)
    for kept in range(99, 0, -1):
        tree.drop(edge, kept, 1, A)
        (leaf,) = edges(tree)
        assert kept <= leaf.length <= 2 * kept
        assert len(leaf.tokens) == 4 * leaf.length
    tree.drop(edge, 0, 1, A)
    assert tree.is_empty


def test_an_end_that_nobody_holds_makes_no_branch() -> None:
    tree = new_tree()
    edge = tree.insert(tree.root, 0, path(1, 2, 3), A)
    tree.drop(edge, 2, 1, A)
    tree.insert(edge, 2, path(4), A)
    assert [leaf.tokens for leaf in edges(tree)] == [path(1, 2, 4)]


paths = st.lists(st.integers(1, 2), min_size=1, max_size=6).map(lambda blocks: path(*blocks))


@given(st.lists(st.tuples(paths, st.sampled_from((A, B))), max_size=12), st.randoms(use_true_random=False))
def test_what_is_inserted_and_dropped_leaves_nothing(
    inserted: list[tuple[bytes, int]], random: Random
) -> None:
    tree = new_tree()
    places = [(tree.insert(tree.root, 0, tokens, bit), tokens, bit) for tokens, bit in inserted]
    random.shuffle(places)
    while places:
        for _, tokens, bit in places:
            assert (len(tokens) // 4, bit) in [(depth, bits & bit) for depth, bits in tree.match(tokens)]
        edge, tokens, bit = places.pop()
        tree.drop(edge, 0, (1 << len(tokens) // 4) - 1, bit)
    assert tree.is_empty
