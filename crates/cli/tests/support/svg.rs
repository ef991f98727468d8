//! Whether a picture is whole.

/// A document of elements that each end, in order, with texts that hold no bare markup.
pub fn well_formed(svg: &str) {
    let mut open = Vec::new();
    let mut rest = svg;
    while let Some(start) = rest.find('<') {
        let end = start + rest[start..].find('>').unwrap();
        let tag = &rest[start + 1..end];
        match (tag.strip_prefix('/'), tag.ends_with('/') || tag.starts_with(['?', '!'])) {
            (Some(name), _) => assert_eq!(open.pop(), Some(name.trim())),
            (None, true) => {}
            (None, false) => open.push(tag.split_whitespace().next().unwrap()),
        }
        assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
        rest = &rest[end + 1..];
    }
    assert!(open.is_empty() && svg.contains("<svg"), "{open:?}");
    assert!(!svg.contains("NaN") && !svg.contains("inf\""));
}
