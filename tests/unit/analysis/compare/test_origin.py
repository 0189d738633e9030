"""Origins of differences and of non-finite values, on one rank and in the whole job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from support.diff_programs import rows
from support.diff_reports import measures

from rankdump._analysis.compare.origin_search import (
    MergedCallOrder,
    RankExchange,
    convert_rank_origin,
    find_job_origin,
    find_sender,
)
from rankdump._analysis.compare.rank_origin import (
    DIFFERENCE_QUESTION,
    GROWING_ERROR_REASON,
    NONFINITE_QUESTIONS,
    OriginQuestion,
    RankOrigin,
    describe_differing_weights,
    find_rank_origins,
)
from rankdump._analysis.compare.report import (
    CONSTANTS_ITERATION,
    ComparisonRow,
    DivergenceOrigin,
    PairOutcome,
    SuspectCall,
    TensorPair,
    TensorVerdict,
)


def found_of(text: str, question: OriginQuestion = DIFFERENCE_QUESTION, **more) -> RankOrigin:
    (found,) = find_rank_origins(rows(text, **more), question)
    return found


def start(
    text: str, question: OriginQuestion = DIFFERENCE_QUESTION, **more
) -> tuple[list[str], bool]:
    """The suspects, and whether it is certain."""
    found = found_of(text, question, **more)
    return [
        step.first_row.name_a or step.first_row.name_b for step in found.calls
    ], not found.ambiguity


def test_origin_is_the_first_call_with_equal_inputs_and_different_outputs():
    assert start("a<= a>= b<= b>! c<! c>!") == (["b"], True)


def test_no_origin_when_nothing_differs():
    assert find_rank_origins(rows("a<= a>= b<= b>="), DIFFERENCE_QUESTION) == []


def test_origin_is_the_innermost_of_nested_calls():
    """The network and a block begin before the layer, and end after it with other outputs."""
    assert start("net<= block<= a<= a>= b<= b>! c<! c>! block>! net>!") == (["b"], True)


def test_origin_is_the_block_that_computes_outside_its_calls():
    """Between a and b the block adds something: no call made what differs in b's inputs."""
    found = found_of("net<= block<= a<= a>= b<! b>! block>! net>!")
    assert found.likeliest_row.name_a == "block"
    assert "inputs of b" in found.reasons[0]


def test_origin_of_a_gradient_is_the_sending_call():
    """Autograd tells the receiver's hook first that the tensor between them has a gradient."""
    names, certain = start("Gradients/b<= Gradients/a<! Gradients/b>! Gradients/a>!")
    assert (names, certain) == (["Gradients/b"], True)


def test_origin_is_a_backward_call_when_the_forward_agrees():
    assert start("a<= a>= b<= b>= Gradients/b<= Gradients/b>! Gradients/a<! Gradients/a>!") == (
        ["Gradients/b"],
        True,
    )


def test_origin_outside_when_the_first_inputs_differ():
    found = found_of("a<= a<! a>! b<! b>!")
    assert (found.likeliest_row.name_a, found.is_outside, found.ambiguity) == ("a", True, "")
    assert "outside what was dumped" in found.reasons[0]
    assert "input.1" in found.reasons[0]


def test_origin_is_an_unmatched_call_before_differing_inputs():
    assert start("a<= a>= +extra<- +extra>- b<! b>!") == (["extra"], True)


def test_origin_is_ambiguous_for_a_replaced_call():
    names, certain = start("a<= a>= *relu<- *relu>- +gelu<- +gelu>- b<! b>!")
    assert (names, certain) == (["gelu", "relu"], False)


def test_origin_is_an_unmatched_call_before_agreeing_calls():
    """The weight is transposed between the extra call and the product that shows it."""
    assert start("a<= a>= +extra<- +extra>- t<= t>= b<! b>!") == (["extra"], True)


def test_unmatched_call_without_effect_is_not_an_origin():
    assert start("a<= a>= +extra<- +extra>- b<= b>= c<= c>!") == (["c"], True)


def test_origin_is_uncertain_with_inputs_that_were_not_compared():
    found = found_of("a<= a>= b<= b<? b>! c<! c>!")
    assert (found.likeliest_row.name_a, found.ambiguity) == ("b", "input.1 could not be compared")


def test_origin_is_uncertain_in_a_dump_of_outputs():
    assert start("a>= b>! c>! net>!") == (["b"], False)


def test_origin_without_inputs_is_certain_where_others_have_inputs():
    assert start("a<= a>= randn>! b<! b>!") == (["randn"], True)


def test_origin_has_two_candidates_in_a_dump_of_inputs():
    assert start("a<= b<= c<! d<!") == (["b", "c"], False)


def test_origin_is_in_the_first_iteration_and_constants_come_last():
    later = [*rows("a<= a>!", iteration=5), *rows("b<= b>!", iteration=2)]
    constant = rows("mask>!", iteration=CONSTANTS_ITERATION, types={"mask": "Parameter"})
    (found,) = find_rank_origins([*constant, *later], DIFFERENCE_QUESTION)
    assert (found.likeliest_row.iteration, found.likeliest_row.name_a) == (2, "b")
    (found,) = find_rank_origins(constant, DIFFERENCE_QUESTION)
    assert found.likeliest_row.name_a == "mask"


def test_nonfinite_values_have_an_origin_for_each_side():
    text = "a<= a>= b<= b>= c<= c>="
    bad = {"b>": True, "c<": True, "c>": True}
    for question in NONFINITE_QUESTIONS:
        assert start(text, question, nonfinite=bad) == (["b"], True)
    assert find_rank_origins(rows(text, nonfinite=bad), DIFFERENCE_QUESTION) == []


def test_nonfinite_origin_names_inputs_of_unknown_finiteness():
    found = found_of("a<= a>= b<= b>!", NONFINITE_QUESTIONS[1], nonfinite={"b<": None, "b>": True})
    assert found.ambiguity == "whether input.0 was finite is not known"
    assert [row.slot_name for row in found.unknown] == ["input.0"]


def test_nonfinite_origin_outside():
    found = found_of("a<= a>=", NONFINITE_QUESTIONS[0], nonfinite={"a<": True, "a>": True})
    assert found.is_outside
    assert found.reasons[0].startswith("its inputs are already not finite")


MASKED = "net<= net<= a<= a<= a>= b<= b<= b>= net>="


def masked(**nonfinite: bool) -> list[ComparisonRow]:
    """The second input of each call is one mask, which is infinite where nobody may look."""
    found: list[ComparisonRow] = []
    for row in rows(MASKED):
        tensor = row.pair.a
        assert tensor is not None
        digest, bad = tensor.digest, nonfinite.get(row.name_a, False)
        if tensor.slot_name == "input.1":
            digest, bad = "mask", True
        elif tensor.slot_name == "input.0":
            bad = row.name_a == "b" and nonfinite.get("a", False)
        tensor = tensor._replace(digest=digest)
        outcome = replace(row.outcome, nonfinite_a=bad)
        found.append(row._replace(pair=TensorPair(tensor, tensor), outcome=outcome))
    return found


def test_infinite_mask_is_not_an_origin():
    """Law: infinity that comes in and does nothing does not hide who made a NaN later."""
    assert find_rank_origins(masked(), NONFINITE_QUESTIONS[0]) == []
    (found,) = find_rank_origins(masked(b=True, net=True), NONFINITE_QUESTIONS[0])
    assert (found.likeliest_row.name_a, found.is_outside) == ("b", False)


def test_nonfinite_data_are_not_taken_for_a_mask():
    (found,) = find_rank_origins(masked(a=True, b=True, net=True), NONFINITE_QUESTIONS[0])
    assert (found.likeliest_row.name_a, found.is_outside) == ("net", True)


def joined(
    rows_of_ranks: list[ComparisonRow], merged: MergedCallOrder | None = None
) -> DivergenceOrigin:
    found = find_rank_origins(rows_of_ranks, DIFFERENCE_QUESTION)
    firsts = [
        SuspectCall(
            f.likeliest_row.rank,
            f.likeliest_row.iteration,
            0,
            "",
            f.likeliest_row.name_a,
            "",
            False,
            "r",
        )
        for f in found
    ]
    origin = find_job_origin(found, merged or MergedCallOrder(), firsts)
    assert origin is not None
    return origin


def test_job_origin_joins_the_same_call_of_all_ranks():
    origin = joined([*rows("a<= a>= b<= b>!"), *rows("a<= a>= b<= b>!", rank=1)])
    assert origin.certain
    assert [(s.name_a, s.rank) for s in origin.suspects] == [("b", 0)]
    assert "the same on rank 1" in origin.suspects[0].reason


def test_job_origin_is_ambiguous_for_different_calls():
    two = [*rows("a<= a>= b<= b>!"), *rows("a<= a>! b<! b>!", rank=1)]
    origin = joined(two)
    assert not origin.certain
    assert {s.name_a for s in origin.suspects} == {"a", "b"}
    places = {(0, 0, "b"): 3, (1, 0, "a"): 7}
    assert [s.rank for s in joined(two, MergedCallOrder(places)).suspects] == [0, 1]


def test_job_origin_is_in_the_earliest_iteration():
    origin = joined([*rows("a<= a>!", iteration=2), *rows("b<= b>!", rank=1, iteration=1)])
    assert (origin.certain, origin.suspects[0].rank) == (True, 1)


GATHER = "a<= a>= gather<= gather>! b<! b>!"
CULPRIT = "a<= a>! gather<! gather>! b<! b>!"


def test_job_origin_is_the_rank_that_sent_data_through_a_collective():
    types = {"gather": "AllGather"}
    two = [*rows(GATHER, types=types), *rows(CULPRIT, rank=1, types=types)]
    origin = joined(two)
    assert origin.certain
    assert [(s.rank, s.name_a) for s in origin.suspects] == [(1, "a")]


def test_job_origin_uses_collectives_of_the_merged_order():
    """A functional all-reduce between two layers: the tree has it in its order alone."""
    two = [*rows("a<= a>= b<! b>!"), *rows("a<= a>! b<! b>!", rank=1)]
    places = {(0, 0, "a"): 0, (1, 0, "a"): 1, (0, 0, "b"): 5, (1, 0, "b"): 6}
    both = frozenset((0, 1))
    merged = MergedCallOrder(places, (RankExchange(0, 3, both, both),))
    assert joined(two, merged).suspects[0].rank == 1
    found = find_rank_origins(two, DIFFERENCE_QUESTION)
    assert [find_sender(each, found, merged) for each in found] == [1, None]


def test_job_origin_follows_a_message_only_to_its_receiver():
    two = [*rows("a<= a>= b<! b>!"), *rows("a<= a>! c<! c>!", rank=1)]
    places = {(0, 0, "b"): 5, (1, 0, "a"): 1}
    there = RankExchange(0, 3, frozenset((1,)), frozenset((0,)))
    back = RankExchange(0, 3, frozenset((0,)), frozenset((1,)))
    assert joined(two, MergedCallOrder(places, (there,))).certain
    assert not joined(two, MergedCallOrder(places, (back,))).certain


def test_job_origin_treats_parameter_gradients_as_shared():
    types = {"Gradients/w": "Parameter"}
    two = [
        *rows("a<= a>= Gradients/w>!", types=types),
        *rows("a<= a>! Gradients/w>!", rank=1, types=types),
    ]
    assert joined(two).suspects[0].name_a == "a"


FC = "Default/network-Net/fc-Linear/Linear-op0"


def test_origin_names_a_differing_weight():
    types = {"fc.weight": "Parameter", "other.weight": "Parameter"}
    mine = rows(f"{FC}<= {FC}>! fc.weight>! other.weight>!", types=types, iteration=1)
    (found,) = find_rank_origins(mine, DIFFERENCE_QUESTION)
    assert (
        describe_differing_weights(found, mine)
        == "; its parameter fc.weight differs too (read after the step)"
    )
    before = rows("fc.weight>=", types=types, iteration=0)
    assert "after the step" in describe_differing_weights(found, [*before, *mine])
    used = rows("fc.weight>!", types=types, iteration=0)
    assert (
        describe_differing_weights(found, [*used, *mine]) == "; its parameter fc.weight differs too"
    )


def test_origin_names_the_layer_of_an_api_call():
    text = "LAYER_fc1_forward<= NN_Linear_0_forward<= NN_Linear_0_forward>!"
    assert found_of(text).reasons[0].endswith("; it is the layer fc1")


def with_ratios(text: str, ratios: Mapping[tuple[str, str], float]) -> list[ComparisonRow]:
    """Rows whose errors are multiples of the expected ones, by names of call and slot."""
    return [
        row._replace(
            outcome=replace(
                row.outcome, error_ratio=ratios.get((row.name_a, row.slot_name[:2]), 0.0)
            )
        )
        for row in rows(text)
    ]


def test_origin_is_the_call_with_a_gain_of_its_own():
    """b and c only add up errors that are normal; d multiplies its error by 25."""
    ratios = {("b", "in"): 3.0, ("b", "ou"): 4.5, ("c", "in"): 4.5, ("c", "ou"): 5.0}
    ratios |= {("d", "in"): 5.0, ("d", "ou"): 125.0, ("e", "in"): 125.0, ("e", "ou"): 400.0}
    text = "a<= a>= b<~ b>! c<! c>! d<! d>! e<! e>!"
    (found,) = find_rank_origins(with_ratios(text, ratios), DIFFERENCE_QUESTION)
    assert (found.likeliest_row.name_a, found.ambiguity) == ("d", "")
    assert found.reasons[0].endswith(
        "; the errors of its inputs are 5 times the expected ones, those of its outputs 125 times"
    )


def test_origin_is_ambiguous_where_normal_errors_add_up():
    ratios = {("b", "in"): 3.0, ("b", "ou"): 4.5, ("c", "in"): 4.5, ("c", "ou"): 5.0}
    (found,) = find_rank_origins(
        with_ratios("a<= a>= b<~ b>! c<! c>!", ratios), DIFFERENCE_QUESTION
    )
    assert found.likeliest_row.name_a == "b"
    assert found.ambiguity == GROWING_ERROR_REASON


def test_gain_of_a_call_without_inputs_is_that_over_the_errors_before_it():
    text, ratios = "a<~ a>~ b>!", {("a", "in"): 2.0, ("a", "ou"): 3.0, ("b", "ou"): 5.0}
    (found,) = find_rank_origins(with_ratios(text, ratios), DIFFERENCE_QUESTION)
    assert found.ambiguity == GROWING_ERROR_REASON
    ratios["b", "ou"] = 50.0
    (found,) = find_rank_origins(with_ratios(text, ratios), DIFFERENCE_QUESTION)
    assert (found.likeliest_row.name_a, found.ambiguity) == ("b", "")


def test_origin_of_one_rank_keeps_its_candidates():
    found = found_of("a<= b<= c<! d<!")
    suspects = tuple(SuspectCall(0, 0, 0, "", n, "", False, "") for n in "bc")
    origin = convert_rank_origin(found, suspects)
    assert (origin.certain, len(origin.suspects)) == (False, 2)
    assert origin.ambiguity


def test_origin_sentences_use_singular_nouns():
    """Numbers and their nouns agree."""
    inputs, outputs = rows("a<= a>!")
    for count, words in ((1, "at 1 place"), (2, "at 2 places")):
        apart = PairOutcome(TensorVerdict.NAN, measures=replace(measures(), nonfinite_apart=count))
        (found,) = find_rank_origins([inputs, outputs._replace(outcome=apart)], DIFFERENCE_QUESTION)
        assert found.reasons[0].endswith(f"is NaN or infinite on one side alone {words}")
