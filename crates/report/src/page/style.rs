//! The page's style, with the colours that all pictures share.

use plimsoll_memory::Tag;
use plimsoll_plan::{Colour, OTHER_COLOUR, colour_of};

const SHEET: &str = include_str!("report.css");

/// How far a colour has to be from the dark page, as WCAG measures contrast.
const LEAST_CONTRAST: f64 = 3.0;

/// The page where it is dark, as in the sheet.
const DARK: Colour = [21, 24, 28];

/// The whole sheet.
pub fn sheet() -> String {
    let kinds = Tag::ALL.map(|tag| (tag.name(), colour_of(tag)));
    let other = [("gaps", OTHER_COLOUR), ("overhead", [125, 130, 140])];
    let kinds: Vec<(&str, Colour)> = kinds.into_iter().chain(other).collect();
    let rules = |colour: fn(Colour) -> Colour| -> String {
        kinds.iter().map(|(name, own)| format!(".k-{name}{{--k:{}}}\n", hex(colour(*own)))).collect()
    };
    let (light, dark) = (rules(|own| own), rules(on_dark));
    format!("{light}@media screen and (prefers-color-scheme:dark){{\n{dark}}}\n{SHEET}")
}

/// The colour, or one as much lighter as it takes to be seen on the dark page.
fn on_dark(own: Colour) -> Colour {
    let lighter = |step: u32| {
        own.map(|part| (f64::from(part) + (255.0 - f64::from(part)) * 0.05 * f64::from(step)) as u8)
    };
    (0..20).map(lighter).find(|colour| contrast(*colour, DARK) >= LEAST_CONTRAST).unwrap_or(own)
}

/// Contrast of two colours, from 1 to 21 (WCAG 2.1).
fn contrast(a: Colour, b: Colour) -> f64 {
    let (a, b) = (luminance(a), luminance(b));
    (a.max(b) + 0.05) / (a.min(b) + 0.05)
}

fn luminance(colour: Colour) -> f64 {
    let [red, green, blue] = colour.map(|part| match f64::from(part) / 255.0 {
        part if part <= 0.03928 => part / 12.92,
        part => ((part + 0.055) / 1.055).powf(2.4),
    });
    0.2126 * red + 0.7152 * green + 0.0722 * blue
}

fn hex([red, green, blue]: Colour) -> String {
    format!("#{red:02x}{green:02x}{blue:02x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_seen_on_a_dark_page() {
        for tag in Tag::ALL {
            assert!(contrast(on_dark(colour_of(tag)), DARK) >= LEAST_CONTRAST, "{tag}");
        }
        assert!((contrast([0; 3], [255; 3]) - 21.0).abs() < 1e-9);
        assert!(SHEET.contains(&format!("--paper: {}", hex(DARK))), "the sheet's dark page is another");
    }
}
