from dappr_llm.text.data.fewer_options import fewer_options, with_matched_options
from dappr_llm.text.data.tasks import ItemRows


def rows(count=40, options=5):
    return ItemRows(
        {"id": f"q{i}", "question": "?", "options": tuple("abcdefg"[:options]), "label": i % options if i else -1}
        for i in range(count)
    )


def test_the_right_option_stays_and_the_others_keep_their_order():
    before, after = rows(), fewer_options(rows(), 4)
    left_out = set()
    for one, other in zip(before, after, strict=True):
        assert len(other["options"]) == 4 and list(other["options"]) == sorted(other["options"])
        if one["label"] >= 0:
            assert other["options"][other["label"]] == one["options"][one["label"]]
        else:
            assert other["label"] == -1
        left_out |= set(one["options"]) - set(other["options"])
    assert len(left_out) == 5  # no position is always the one
    assert fewer_options(ItemRows(before[3:9]), 4) == after[3:9]  # whichever other rows there are
    assert before == rows()


def test_few_options_and_fixed_labels_are_left_as_they_are():
    assert fewer_options(rows(options=3), 4) == rows(options=3)
    fixed = rows()
    fixed.labels = tuple("abcde")
    assert fewer_options(fixed, 2) is fixed


def test_options_are_matched_to_those_of_another_task():
    four, five = rows(options=4), rows()
    assert with_matched_options(five, four) == fewer_options(five, 4)
    assert with_matched_options(four, five) == four
    four.labels = tuple("abcd")
    assert with_matched_options(five, four) is five
    assert with_matched_options([1], five) == [1]  # images
