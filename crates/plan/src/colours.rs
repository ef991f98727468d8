//! The colours of pictures: one a tag, the same in every picture.

use plimsoll_memory::Tag;

/// Red, green and blue.
pub type Colour = [u8; 3];

/// Colours of all tags. Those that occur in most training steps are colours that the colour-blind can tell apart (Okabe and
/// Ito).
pub const COLOURS: [(Tag, Colour); 13] = [
    (Tag::Weights, [0, 114, 178]),
    (Tag::MasterWeights, [86, 180, 233]),
    (Tag::Gradients, [213, 94, 0]),
    (Tag::Optimizer, [230, 159, 0]),
    (Tag::Activations, [0, 158, 115]),
    (Tag::Attention, [148, 203, 149]),
    (Tag::Logits, [204, 121, 167]),
    (Tag::Workspace, [120, 94, 140]),
    (Tag::Adapters, [240, 228, 66]),
    (Tag::Staging, [166, 118, 29]),
    (Tag::KvCache, [0, 82, 92]),
    (Tag::Communication, [163, 26, 92]),
    (Tag::Data, [100, 100, 100]),
];

/// The colour of what has no tag, such as the gaps between allocations.
pub const OTHER_COLOUR: Colour = [150, 150, 150];

/// The colour of a tag.
pub fn colour_of(tag: Tag) -> Colour {
    COLOURS.iter().find(|(known, _)| *known == tag).map_or(OTHER_COLOUR, |(_, own)| *own)
}
