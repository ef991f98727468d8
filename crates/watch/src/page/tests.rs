use roxmltree::{Document, Node};

use super::*;
use crate::terminal::tests::{metrics, view};

fn parsed(fragment: &str) -> String {
    format!("<main>{fragment}</main>")
}

fn texts(node: Node<'_, '_>) -> String {
    node.descendants().filter(Node::is_text).filter_map(|node| node.text()).collect::<Vec<_>>().join(" ")
}

#[test]
fn a_run_is_on_the_page_with_all_that_the_terminal_shows() {
    let text = parsed(&runs(&[view()], None).unwrap());
    let document = Document::parse(&text).unwrap();
    let words = texts(document.root_element());
    for said in [
        "runs/demo",
        "running",
        "2.0500",
        "from 4.000",
        "1.00e-3",
        "256",
        "Learning rate",
        "Memory by owner",
        "240.0 MiB of 256.0 MiB (94 %)",
        "warning",
        "weights",
        "program",
        "3.00 MiB",
        "75.0 %",
        "200.0 MiB",
        "validation loss 2.5000",
        "saved runs/demo/checkpoint-20",
    ] {
        assert!(words.contains(said), "{said} is not in {words}");
    }
    let count = |name: &str| document.descendants().filter(|node| node.has_tag_name(name)).count();
    // Loss, speed, learning rate and memory by owner; the plan is not known.
    assert_eq!((count("figure"), count("article"), count("script")), (4, 1, 0));
}

#[test]
fn several_runs_stand_side_by_side_and_are_zoomed_together() {
    let text = parsed(&runs(&[view(), view()], Some(10)).unwrap());
    let document = Document::parse(&text).unwrap();
    assert_eq!(document.descendants().filter(|node| node.has_tag_name("article")).count(), 2);
    let columns = document.descendants().find_map(|node| node.attribute("data-columns"));
    assert_eq!(columns, Some("10"));
}

#[test]
fn hostile_words_are_words() {
    let hostile = "</script><img src=x onerror=\"alert(1)\">&'";
    let mut view = View::of(hostile);
    view.step(&metrics(1));
    view.state = State::Ended(hostile.to_owned());
    view.notes.push(hostile.to_owned());
    view.happened(Event::new(None, crate::event::Kind::Warning, hostile));
    let text = parsed(&runs(&[view], None).unwrap());
    let document = Document::parse(&text).unwrap();
    assert!(document.descendants().all(|node| !node.has_tag_name("img") && !node.has_tag_name("script")));
    assert_eq!(texts(document.root_element()).matches("onerror").count(), 5);
}

#[test]
fn the_page_lets_nothing_else_run() {
    let page = page().unwrap();
    assert!(page.policy.starts_with("default-src 'none'; style-src 'sha256-"), "{}", page.policy);
    assert!(!page.policy.contains("unsafe") && page.policy.ends_with("frame-ancestors 'none'"));
    assert!(
        !page.html.contains("style=")
            && !page.html.contains("onclick")
            && !page.html.contains("http:")
            && !page.html.contains("https:")
    );
    assert_eq!(page.html.matches("<script").count(), 1);
}

#[test]
fn nothing_known_is_a_page_too() {
    for view in [View::default(), View::of("x")] {
        Document::parse(&parsed(&runs(&[view], Some(u64::MAX)).unwrap())).unwrap();
    }
    assert_eq!(runs(&[], None).unwrap().trim(), "");
}
