//! The page of a snapshot is whole HTML, says what the analysis says, and takes nothing from the file as markup.

use plimsoll_report::snapshot_page;
use plimsoll_stacks::allocator::{CachingAllocator, Settings, TraceTag};
use plimsoll_stacks::snapshot::{
    Analysis, Format, Limits, StackFrame, TorchVersion, read_snapshot, write_snapshot,
};

const HOSTILE: &str = "</script><img src=x onerror=alert(1)>\" ' & {{ 1 + 1 }} <!--";

#[test]
fn the_page_is_whole_and_escapes_what_comes_from_the_file() {
    let mut allocator = CachingAllocator::new(Settings::default(), 1 << 30);
    allocator.record_history(usize::MAX);
    allocator.set_tag(TraceTag(1));
    for _ in 0..100 {
        allocator.malloc(3 << 20, 0).unwrap();
    }
    allocator.malloc(2 << 30, 0).unwrap_err();
    let frames =
        |_| vec![StackFrame { name: HOSTILE.to_owned(), filename: format!("{HOSTILE}.py"), line: 3 }];
    let mut bytes = Vec::new();
    write_snapshot(&[&allocator], frames, Format::Python(TorchVersion::V2_9), &mut bytes).unwrap();
    let snapshot = read_snapshot(&bytes[..], bytes.len() as u64, Limits::default()).unwrap();
    let analysis = Analysis::of(&snapshot, 0);
    let page = snapshot_page(HOSTILE, &analysis).unwrap();
    let (before, rest) = page.split_once("<style>").unwrap();
    let (_, after) = rest.split_once("</style>").unwrap();
    let page = format!("{before}{after}");
    let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
    let tree = roxmltree::Document::parse_with_options(&page, options).unwrap();
    let count = |name: &str| tree.descendants().filter(|node| node.has_tag_name(name)).count();
    assert_eq!((count("img"), count("script"), count("link")), (0, 0, 0));
    assert_eq!(tree.descendants().filter(|node| node.attribute("class") == Some("area")).count(), 1);
    let text: String = tree.descendants().filter_map(|node| node.text()).collect();
    assert!(text.contains("At most 300.0 MiB were live"), "{text}");
    assert!(text.contains("Out of memory at"));
    // Every allocation of the line is kept.
    assert!(text.contains("What only grows"));
}
