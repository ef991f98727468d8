//! What happened, the last at the bottom.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};
use ratatui::widgets::Widget;

use super::{Look, Panel, titled};
use crate::view::View;

pub fn draw(buffer: &mut Buffer, area: Rect, view: &View, look: &Look) {
    let total = view.events_so_far();
    let words = if total > 0 { format!("{total}") } else { String::new() };
    let below = titled(buffer, area, Panel::Events, vec![Span::styled(words, look.colours.faint())], look);
    let notes = view.notes.iter().map(|note| Line::from(Span::raw(note.clone())));
    let events = view.events().map(|event| {
        let step = event.step.map_or(String::new(), |step| step.to_string());
        Line::from(vec![
            Span::styled(format!("{step:>7} "), look.colours.faint()),
            Span::styled(event.text.clone(), look.colours.of_event(event.kind)),
        ])
    });
    let all: Vec<Line<'_>> = notes.chain(events).collect();
    let rows = usize::from(below.height);
    for (y, line) in (below.y..below.bottom()).zip(all.iter().skip(all.len().saturating_sub(rows))) {
        line.render(Rect { y, height: 1, ..below }, buffer);
    }
}
