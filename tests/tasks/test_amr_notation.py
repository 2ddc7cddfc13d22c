"""PENMAN as annotators and models write it: read where it is a graph, refused with its reason where it is none, mended
only on request."""

import penman
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finefit.tasks import NoResult
from finefit.tasks.amr_notation import (
    Edge,
    Node,
    defined_twice,
    find_graph,
    joined_concepts,
    mended,
    parse,
    parse_loosely,
    renamed,
    write,
)

WANT = '(w / want-01 :polarity - :ARG0 (b / boy) :ARG1 (g / go-02 :ARG0 b :time "ten o\'clock"))'


def test_a_graph_is_a_tree_of_nodes_whose_bare_variables_point_back() -> None:
    boy = Node("b", "boy")
    go = Node("g", "go-02", (Edge("ARG0", "b"), Edge("time", '"ten o\'clock"')))
    assert parse(WANT) == Node("w", "want-01", (Edge("polarity", "-"), Edge("ARG0", boy), Edge("ARG1", go)))


def test_lines_and_indentation_make_no_difference() -> None:
    assert parse(WANT.replace(" :", "\n\t  :").replace("(", "( ").replace(")", " )")) == parse(WANT)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("(m / mưa :time(h / hôm nay) :degree(t1 / to))", "(m / mưa :time (h / hôm nay) :degree (t1 / to))"),
        ("(đ / đọc\n    :theme(ô / ô   tô\n  ))", "(đ / đọc :theme (ô / ô tô))"),
        ("(n/ngủ :polarity -)", "(n / ngủ :polarity -)"),
        ("(x / km/h :value 10:30)", "(x / km/h :value 10:30)"),
        ('(n / name :op1"Salt" :op2 "Lake (old)")', '(n / name :op1 "Salt" :op2 "Lake (old)")'),
        ('(w~e.1 / want-01~e.2 :ARG0~e.3 (b / boy~4,5) :op1 "x"~e.6)', '(w~e.1 / want-01 :ARG0 (b / boy) :op1 "x")'),
        ("(t / thi\u0301ch)", "(t / th\u00edch)"),
        ('(n / "New (York)" :quant 1)', '(n / "New (York)" :quant 1)'),
    ],
    ids=[
        "role at its bracket",
        "blanks in a concept",
        "no blanks",
        "slash and colon",
        "texts",
        "alignments",
        "composed letters",
        "quoted concept",
    ],
)
def test_quirks_of_annotators_are_read(written: str, meant: str) -> None:
    assert write(parse(written)) == meant


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("want-01", "this is not a graph: it does not begin with a bracket"),
        ("(w / want-01 :ARG0 (b / boy)", "a bracket is not closed"),
        ("(w / want-01))", "`)` comes after the graph"),
        ("(w / want-01) (b / boy)", "`(b / boy)` comes after the graph"),
        ("(w / want-01 :ARG0 :ARG1 (b / boy))", ":ARG0 has no target"),
        ("(w / want-01 :ARG0)", ":ARG0 has no target"),
        ("(w / want-01 (b / boy))", "`(b / boy))` is where a role should be"),
        ("(w / :ARG0 (b / boy))", "a node has no concept: `(w / :ARG0 (b / boy))`"),
        ("(want-01 :ARG0 (boy))", "a node has no concept: `(want-01 :ARG0 (boy))`"),
        ("( / want-01)", "a node has no variable: `( / want-01)`"),
        ('(n / name :op1 "Salt)', 'a quote is not closed: `"Salt)`'),
        ("(a / b :r " * 300, "brackets are nested deeper than 200 levels"),
        ("(w / want-01 :ARG0 (b / boy) :ARG1 (b / bird))", "the variable b is defined twice"),
    ],
)
def test_what_is_no_graph_is_refused_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(NoResult) as caught:
        parse(text)
    assert str(caught.value) == reason


def test_penman_and_we_read_the_same_where_penman_reads() -> None:
    def told(text: str) -> set[tuple[str, str, str]]:
        """Of penman: as the tree is written, before roles are turned round."""
        written = [(variable, role, target) for variable, edges in penman.parse(text).nodes() for role, target in edges]
        return {
            (variable, role, str(target[0] if isinstance(target, tuple) else target))
            for variable, role, target in written
        }

    def ours(node: Node) -> set[tuple[str, str, str]]:
        own = {(node.variable, "/", node.concept)}
        for edge in node.edges:
            own |= {
                (node.variable, f":{edge.role}", edge.target.variable if isinstance(edge.target, Node) else edge.target)
            }
            own |= ours(edge.target) if isinstance(edge.target, Node) else set()
        return own

    for text in (WANT, "(a / and :op1 (c / cat :quant 3) :op2 (d / dog :poss c :ARG0-of (b / bark-01)))"):
        assert ours(parse(text)) == told(text)


NAMES = st.from_regex(r"[a-zđô]{1,3}[0-9]{0,2}", fullmatch=True)
WORDS = st.lists(st.from_regex(r"[a-zàé]+(-[0-9]{2})?", fullmatch=True), min_size=1, max_size=3).map(" ".join)
LEAVES = st.sampled_from(["-", "+", "3", '"a (b) :c"', "3.5"])


def trees(children: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    edges = st.builds(Edge, st.from_regex(r"[a-z]+[0-9]?(-of)?", fullmatch=True), children | LEAVES)
    return st.builds(Node, NAMES, WORDS, st.lists(edges, max_size=3).map(tuple))


GRAPHS = st.recursive(st.builds(Node, NAMES, WORDS), trees, max_leaves=8)


@given(GRAPHS)
def test_what_is_written_is_read_again(root: Node) -> None:
    assert parse_loosely(write(root)) == root


@given(GRAPHS)
def test_after_renaming_every_variable_is_defined_once_and_nothing_else_has_changed(root: Node) -> None:
    found, changes = renamed(root)
    assert defined_twice(found) == []
    assert bool(changes) == bool(defined_twice(root))
    assert [node.concept for node in _nodes(found)] == [node.concept for node in _nodes(root)]
    assert renamed(found) == (found, ())


def _nodes(root: Node) -> list[Node]:
    return [root, *(node for edge in root.edges if isinstance(edge.target, Node) for node in _nodes(edge.target))]


def test_a_variable_defined_twice_gets_a_name_that_nobody_has() -> None:
    root, changes = renamed(parse_loosely("(c / con :a (c / chuột :b c) :d (c2 / x) :e c3)"))
    assert write(root) == "(c / con :a (c4 / chuột :b c) :d (c2 / x) :e c3)"
    assert changes == ("c / chuột is c4 now, since c was defined before",)


@pytest.mark.parametrize(
    ("answer", "graph"),
    [
        ("Sure! Here it is:\n(w / want :ARG0 (b / boy))\nI hope (really) that helps.", "(w / want :ARG0 (b / boy))"),
        ("```\n(w / want)\n```", "(w / want)"),
        ("(see below) (w / want", "(w / want"),
        ('(n / name :op1 "a) b") rest', '(n / name :op1 "a) b")'),
        ("(w / want) (b / boy)", "(w / want)"),
    ],
)
def test_the_graph_is_found_among_prose(answer: str, graph: str) -> None:
    assert find_graph(answer) == graph


@pytest.mark.parametrize(
    ("answer", "reason"), [("", "the answer is empty"), ("I cannot (sorry).", "the answer holds no graph")]
)
def test_an_answer_without_a_graph_says_so(answer: str, reason: str) -> None:
    with pytest.raises(NoResult, match=reason):
        find_graph(answer)


@pytest.mark.parametrize(
    ("text", "graph", "num_mends"),
    [
        (WANT, WANT, 0),
        ("(w / want :ARG0 (b / boy", "(w / want :ARG0 (b / boy))", 2),
        ("(w / want :ARG0 (b / boy)) ) )", "(w / want :ARG0 (b / boy))", 1),
        ("(w / want :ARG0 :ARG1 (b / boy))", "(w / want :ARG1 (b / boy))", 1),
        (
            "(w / want :ARG0 (b / boy) :ARG1 (b / bird :poss b))",
            "(w / want :ARG0 (b / boy) :ARG1 (b2 / bird :poss b))",
            1,
        ),
        ("(w / want :ARG0 (b /", "(w / want)", 3),
        ('(n / name :op1 "Salt)', '(n / name :op1 "Salt")', 1),
        ("(w / want (b / boy) :ARG1 (g / go))", "(w / want :ARG1 (g / go))", 1),
    ],
)
def test_mending_closes_drops_and_renames_and_tells_each(text: str, graph: str, num_mends: int) -> None:
    root, mends = mended(text)
    assert write(root) == graph
    assert len(mends) == num_mends
    assert parse(write(root)) == root


@given(st.text(alphabet='()/:" abAB01-\n', max_size=60))
def test_a_text_of_any_kind_is_mended_into_a_graph_or_refused(text: str) -> None:
    try:
        root, _ = mended(text)
    except NoResult:
        return
    assert parse(write(root)) == root


def test_words_of_a_concept_are_joined_alike_or_left() -> None:
    root = parse('(h / hôm nay :poss(e / em_bé) :name "Hà Nội" :value ba mươi :of h)')
    assert (
        write(joined_concepts(root, "underscores"))
        == '(h / hôm_nay :poss (e / em_bé) :name "Hà Nội" :value ba_mươi :of h)'
    )
    assert joined_concepts(root, "as_written") == root
