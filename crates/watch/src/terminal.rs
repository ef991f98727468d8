//! A view as cells of a terminal, from 80 x 24 up. What is drawn depends on the views and on how they are looked at ([`Look`]), and on nothing
//! else; opening the terminal and reading its keys is left to the caller.

mod colours;
mod curves;
mod events;
mod help;
mod keys;
mod memory;
mod stack;
mod tiers;
mod timeline;

use plimsoll_monitor::Status;
use plimsoll_report::{count, seconds};
use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Widget, Wrap};

pub use self::colours::Colours;
pub use self::keys::{Look, Panel, Wish};
use crate::view::View;

/// Below this size there is room for a few words only.
const LEAST: (u16, u16) = (44, 14);

/// Draws the run that is looked at.
pub fn draw(frame: &mut Frame<'_>, runs: &[View], look: &Look) {
    let area = frame.area();
    let buffer = frame.buffer_mut();
    let Some(view) = runs.get(look.run.min(runs.len().saturating_sub(1))) else { return };
    if area.width < LEAST.0 || area.height < LEAST.1 {
        words_only(buffer, area, view, look);
        return;
    }
    let [head, gauge, body, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Min(0),
        Constraint::Length(1),
    ])
    .areas(area);
    header(buffer, head, view, look, runs.len());
    progress(buffer, gauge, view, look);
    match look.panel {
        Some(panel) => panel_of(buffer, body, panel, view, look),
        None => overview(buffer, body, view, look),
    }
    help::footer(buffer, foot, look, runs.len());
    if look.help {
        help::keys(buffer, area, look);
    } else if look.asks {
        help::question(buffer, area);
    }
}

/// All panels, each as high as there is room.
fn overview(buffer: &mut Buffer, area: Rect, view: &View, look: &Look) {
    let height = area.height;
    let room = usize::from(area.width.max(2)) - 1;
    let rows = tiers::lines(view, look).iter().map(|line| line.width().div_ceil(room).max(1)).sum::<usize>();
    // A line that is broken between words may take one more.
    let lists = (rows as u16).saturating_add(1).min(height / 4);
    let rest = height - lists;
    let events = (rest / 6).max(3);
    let step = (rest / 5).max(4);
    let charts = (rest - events - step) / 2;
    let [top, band, step, lists, events] = Layout::vertical([
        Constraint::Length(charts),
        Constraint::Min(0),
        Constraint::Length(step),
        Constraint::Length(lists),
        Constraint::Length(events),
    ])
    .areas(area);
    let [loss, speed, rate] =
        Layout::horizontal([Constraint::Percentage(40), Constraint::Percentage(32), Constraint::Min(0)])
            .spacing(1)
            .areas(top);
    for (panel, area) in [
        (Panel::Loss, loss),
        (Panel::Speed, speed),
        (Panel::LearningRate, rate),
        (Panel::Memory, band),
        (Panel::Step, step),
        (Panel::Tiers, lists),
        (Panel::Events, events),
    ] {
        panel_of(buffer, area, panel, view, look);
    }
}

fn panel_of(buffer: &mut Buffer, area: Rect, panel: Panel, view: &View, look: &Look) {
    match panel {
        Panel::Loss | Panel::Speed | Panel::LearningRate => curves::draw(buffer, area, panel, view, look),
        Panel::Memory => memory::draw(buffer, area, view, look),
        Panel::Step => timeline::draw(buffer, area, view, look),
        Panel::Tiers => tiers::draw(buffer, area, view, look),
        Panel::Events => events::draw(buffer, area, view, look),
    }
}

/// Whose run it is and how it stands.
fn header(buffer: &mut Buffer, area: Rect, view: &View, look: &Look, runs: usize) {
    let style = Style::new().add_modifier(Modifier::REVERSED);
    buffer.set_style(area, style);
    let mut left = format!(" {}", view.title());
    if let Some(plan) = &view.plan {
        left.push_str(&format!("  {}", plan.settings));
    }
    let mut right = view.state.words();
    if runs > 1 {
        right = format!("{right}  run {} of {runs}", look.run + 1);
    }
    if look.paused {
        right = format!("PAUSED  {right}");
    }
    let right = format!("  {right} ");
    let room = usize::from(area.width).saturating_sub(right.chars().count());
    buffer.set_stringn(area.x, area.y, left, room, style.add_modifier(Modifier::BOLD));
    let wide = right.chars().count().min(usize::from(area.width)) as u16;
    buffer.set_stringn(area.right() - wide, area.y, right, usize::from(wide), style);
}

/// How far the run is, as a bar and in numbers.
fn progress(buffer: &mut Buffer, area: Rect, view: &View, look: &Look) {
    let of = view.total_steps.map_or(String::new(), |total| format!("/{}", count(total)));
    let mut words = vec![format!("step {}{of}", count(view.steps_done()))];
    if let Some(share) = view.share_done() {
        words.push(format!("{:.0} %", (100.0 * share).floor()));
    }
    words.extend(view.left().map(|left| format!("{} left", seconds(left))));
    if let Some(last) = &view.last {
        words.push(format!("{} tokens", count(last.tokens)));
        words.push(format!("grad norm {:.2}", last.grad_norm));
    }
    if view.skipped > 0 {
        words.push(format!("{} skipped", count(view.skipped)));
    }
    let words = words.join("  ");
    let bar = usize::from(area.width).saturating_sub(words.chars().count() + 3).clamp(4, 40);
    let done = (view.share_done().unwrap_or(0.0) * bar as f64).floor() as usize;
    Line::from(vec![
        Span::raw(" "),
        Span::styled("█".repeat(done), look.colours.accent()),
        Span::styled("░".repeat(bar - done), look.colours.faint()),
        Span::raw("  "),
        Span::raw(words),
    ])
    .render(area, buffer);
}

/// The rule above a panel, with its number, its name and what there is to say in a line. What is left below it.
fn titled(buffer: &mut Buffer, area: Rect, panel: Panel, words: Vec<Span<'_>>, look: &Look) -> Rect {
    let Rect { x, y, width, .. } = area;
    if area.height == 0 || width == 0 {
        return Rect::default();
    }
    buffer.set_stringn(x, y, "─".repeat(usize::from(width)), usize::from(width), look.colours.faint());
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let mut title = vec![
        Span::styled(format!("{} ", panel.key()), look.colours.faint()),
        Span::styled(panel.name(), bold),
        Span::raw(" "),
    ];
    title.extend(words);
    title.push(Span::raw(" "));
    let room = Rect { x: x + 1.min(width - 1), width: width.saturating_sub(2), height: 1, y };
    let line = Line::from(title);
    let wide = (line.width() as u16).min(room.width);
    // The words replace the rule.
    buffer.set_stringn(room.x, y, " ".repeat(usize::from(wide)), usize::from(wide), Style::new());
    line.render(Rect { width: wide, ..room }, buffer);
    Rect { y: y + 1, height: area.height - 1, ..area }
}

/// A status in its colour.
fn status_words(status: Status, look: &Look) -> Span<'static> {
    Span::styled(status.name(), look.colours.of_status(status))
}

/// A terminal that is too small for pictures.
fn words_only(buffer: &mut Buffer, area: Rect, view: &View, look: &Look) {
    let mut lines = vec![Line::from(view.title().to_owned()), Line::from(view.state.words())];
    if let Some(last) = &view.last {
        let of = view.total_steps.map_or(String::new(), |total| format!("/{total}"));
        lines.push(Line::from(format!("step {}{of}  loss {:.4}", last.step, last.loss)));
        lines.push(Line::from(format!("{:.0} tokens/s", last.tokens_per_second)));
        lines.push(Line::from(vec![Span::raw("memory "), status_words(view.status(), look)]));
    }
    lines.push(Line::from("make the window larger for pictures; q quits"));
    Paragraph::new(lines).wrap(Wrap { trim: true }).render(area, buffer);
}

#[cfg(test)]
pub(crate) mod tests;
