//! Codes in bits, sixteen lanes side by side: a lane is a token of a block (keys), or a sixteenth of a token's channels (values).
//!
//! A lane's codes follow each other without gaps, the lowest bits first. This stream of bits is cut into planes of 32 bits and, of what
//! is left, at most one each of 16, 8, 4, 2 and 1; a plane holds the sixteen lanes' bits one after the other, little-endian. What lies
//! of a code in one plane is a field; most codes have one. A vector loop takes a field of all lanes out with one mask: what remains is
//! the code times a power of two, exact in f32, and that factor goes where the code is multiplied anyway.
//!
//! A field that reaches the highest of 32 bits would come out negative. Its highest bit is stored flipped, so that it comes out less by a
//! constant ([`Lanes::biases`]), which is added where zeros are.

use super::rows::LANES;

/// Widths of planes, widest first; only the first can occur more than once.
const WIDTHS: [u32; 6] = [32, 16, 8, 4, 2, 1];

/// What lies of a code in one plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Field {
    /// Which code of a lane.
    code: usize,
    /// Bits of the code that lie in planes before.
    low: u32,
    /// Where the field begins in a lane's bits.
    shift: u32,
    bits: u32,
    /// First bit of the first lane's field in a block, and from one lane to the next.
    first: usize,
    stride: usize,
}

/// The same bits of all lanes.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Plane {
    /// Bits of a lane.
    pub width: u32,
    /// Where the plane begins in a block.
    pub start: usize,
    /// Its fields, in order of their bits.
    pub fields: std::ops::Range<usize>,
    /// Two for each field in planes of 8 and of 16 bits: its even lanes, then its odd ones.
    pub columns: Vec<Column>,
}

/// Words of a column.
pub(super) const WORDS: usize = 8;

/// Eight 32-bit words as they lie in a plane of 8 or 16 bits hold several lanes each, of which this is one's field in each word. The four
/// words of a token in a plane of 8 bits are taken twice: the first time for the lower lanes, the second time for the upper ones.
#[derive(Debug, Clone, PartialEq)]
#[repr(align(32))]
pub(super) struct Column {
    /// The field's bits, once the word is shifted.
    pub masks: [u32; WORDS],
    /// What its bits count in the code as they come out.
    pub places: [f32; WORDS],
    /// By how much the word is shifted right first, so that its highest bit does not come out negative.
    pub shift: u32,
}

impl Column {
    /// The even (0) or odd (1) lanes of a field.
    fn new(width: u32, field: &Field, odd: u32) -> Self {
        let shift = if odd == 1 && field.shift + field.bits == width { width } else { 0 };
        let mut column = Self { masks: [0; WORDS], places: [0.0; WORDS], shift };
        for word in 0..WORDS {
            let lane = if width == 8 && word >= WORDS / 2 { odd + 2 } else { odd };
            let at = field.shift + lane * width - shift;
            column.masks[word] = ((1 << field.bits) - 1) << at;
            column.places[word] = (field.low as f32 - at as f32).exp2();
        }
        column
    }
}

/// A code that lies in one plane as a whole, to be looked up in a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Look {
    /// Where its bits begin in the plane's.
    pub shift: u32,
    /// Which of the tables: [`Lanes::tables`].
    pub table: usize,
}

/// A code of which each plane has a part only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Split {
    pub parts: Vec<SplitPart>,
    /// Which of the tables: [`Lanes::tables`].
    pub table: usize,
}

/// Some bits of a code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SplitPart {
    /// Index of the plane.
    pub plane: usize,
    /// Where they begin in the plane's bits, and in the code's.
    pub shift: u32,
    pub low: u32,
    /// As many bits as there are, from the lowest on.
    pub mask: u32,
}

/// How the codes of a lane are looked up, those of at most [`LOOKED_UP`] bits.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Looks {
    /// Of each plane.
    pub planes: Vec<Vec<Look>>,
    pub splits: Vec<Split>,
    /// The code of each look, plane by plane, then of each split one.
    pub codes: Vec<usize>,
    /// Bits of the codes that a table is for, and which of them are stored flipped.
    tables: Vec<(u32, u8)>,
}

/// Most bits of codes that are looked up in lanes: a table lies in one register of eight.
pub(super) const LOOKED_UP: u32 = 3;

impl Looks {
    fn new(planes: &[Plane], fields: &[Field], of_code: &[std::ops::Range<usize>]) -> Self {
        let mut looks = Self { planes: vec![Vec::new(); planes.len()], ..Self::default() };
        let bits = |code: usize| fields[of_code[code].clone()].iter().map(|f| f.bits).sum::<u32>();
        let flips =
            |code: usize| fields[of_code[code].clone()].iter().fold(0, |all, f| all | (f.flip() << f.low) as u8);
        let mut table = |code: usize| {
            let own = (bits(code), flips(code));
            looks.tables.iter().position(|t| *t == own).unwrap_or_else(|| {
                looks.tables.push(own);
                looks.tables.len() - 1
            })
        };
        for (plane, to) in planes.iter().zip(&mut looks.planes) {
            for field in fields[plane.fields.clone()].iter().filter(|f| of_code[f.code].len() == 1) {
                to.push(Look { shift: field.shift, table: table(field.code) });
                looks.codes.push(field.code);
            }
        }
        for (code, own) in of_code.iter().enumerate().filter(|(_, own)| own.len() > 1) {
            let part = |at: usize| SplitPart {
                plane: planes.iter().take_while(|p| p.fields.end <= at).count(),
                shift: fields[at].shift,
                low: fields[at].low,
                mask: (1 << fields[at].bits) - 1,
            };
            looks.splits.push(Split { parts: own.clone().map(part).collect(), table: table(code) });
            looks.codes.push(code);
        }
        looks
    }
}

/// How the codes of a lane are laid out.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Lanes {
    pub planes: Vec<Plane>,
    pub looks: Box<Looks>,
    fields: Vec<Field>,
    masks: Vec<u32>,
    biases: Vec<f32>,
    /// The fields of each code.
    of_code: Vec<std::ops::Range<usize>>,
    /// Bytes of a block.
    pub bytes: usize,
}

impl Field {
    /// Whether its highest bit is stored flipped.
    fn flipped(&self) -> bool {
        self.shift + self.bits == WIDTHS[0]
    }

    /// What its highest bit is stored with.
    fn flip(&self) -> u16 {
        u16::from(self.flipped()) << (self.bits - 1)
    }
}

impl Lanes {
    /// From the bits of each code of a lane, 1 to 8.
    pub fn new(bits: &[u32]) -> Self {
        let total: u32 = bits.iter().sum();
        let mut widths = vec![WIDTHS[0]; (total / WIDTHS[0]) as usize];
        widths.extend(WIDTHS[1..].iter().filter(|w| (total % WIDTHS[0]) & **w != 0));
        let mut of_code = vec![0..0; bits.len()];
        let (mut planes, mut fields, mut start) = (Vec::new(), Vec::<Field>::new(), 0);
        let (mut code, mut low) = (0, 0);
        for width in widths {
            let (first, mut shift) = (fields.len(), 0);
            while shift < width {
                let own = (bits[code] - low).min(width - shift);
                if low == 0 {
                    of_code[code].start = fields.len();
                }
                fields.push(Field {
                    code,
                    low,
                    shift,
                    bits: own,
                    first: 8 * start + shift as usize,
                    stride: width as usize,
                });
                of_code[code].end = fields.len();
                (shift, low) = (shift + own, low + own);
                if low == bits[code] {
                    (code, low) = (code + 1, 0);
                }
            }
            let columns = match width {
                8 | 16 => fields[first..].iter().flat_map(|f| [0, 1].map(|odd| Column::new(width, f, odd))).collect(),
                _ => Vec::new(),
            };
            planes.push(Plane { width, start, fields: first..fields.len(), columns });
            start += LANES * width as usize / 8;
        }
        let masks = fields.iter().map(|f| ((1 << f.bits) - 1) << f.shift).collect();
        let mut biases = vec![0.0; bits.len()];
        for field in fields.iter().filter(|f| f.flipped()) {
            biases[field.code] = ((field.low + field.bits - 1) as f32).exp2();
        }
        let looks = match bits.iter().all(|bits| *bits <= LOOKED_UP) {
            true => Box::new(Looks::new(&planes, &fields, &of_code)),
            false => Box::default(),
        };
        Self { planes, looks, fields, masks, biases, of_code, bytes: start }
    }

    /// Codes of a lane.
    pub fn codes(&self) -> usize {
        self.of_code.len()
    }

    /// Whether every code is a field of its own, so that the n-th field is the n-th code.
    pub fn whole(&self) -> bool {
        self.fields.len() == self.codes()
    }

    /// Fields of a lane.
    pub fn fields(&self) -> usize {
        self.fields.len()
    }

    /// The code that a field belongs to.
    pub fn code(&self, field: usize) -> usize {
        self.fields[field].code
    }

    /// A field's bits in its plane.
    pub fn masks(&self, plane: &Plane) -> &[u32] {
        &self.masks[plane.fields.clone()]
    }

    /// What a field's bits count in the code as they lie in their plane.
    pub fn place(&self, field: usize) -> f32 {
        let Field { low, shift, .. } = self.fields[field];
        (low as f32 - shift as f32).exp2()
    }

    /// What the fields of each code come out too small by, in all.
    pub fn biases(&self) -> &[f32] {
        &self.biases
    }

    /// Bits of a code.
    pub fn bits(&self, code: usize) -> u32 {
        self.fields[self.of_code[code].clone()].iter().map(|f| f.bits).sum()
    }

    /// What the tables of [`Looks`] hold, given what codes of 1, 2, … bits stand for: by the lowest bits of an index, over and over.
    pub fn tables(&self, levels: &[[f32; 256]]) -> Vec<[f32; LANES]> {
        let table = |&(bits, flips): &(u32, u8)| {
            std::array::from_fn(|i| levels[bits as usize - 1][(i & ((1 << bits) - 1)) ^ usize::from(flips)])
        };
        self.looks.tables.iter().map(table).collect()
    }

    /// Writes one code over whatever was there.
    pub fn put(&self, block: &mut [u8], lane: usize, code: usize, value: u8) {
        for field in &self.fields[self.of_code[code].clone()] {
            let at = field.first + lane * field.stride;
            let (mask, value) = ((1u16 << field.bits) - 1, (u16::from(value) >> field.low) ^ field.flip());
            let (mask, value) = (mask << (at % 8), (value & mask) << (at % 8));
            for (i, byte) in block[at / 8..].iter_mut().take(2).enumerate() {
                let (mask, value) = ((mask >> (8 * i)) as u8, (value >> (8 * i)) as u8);
                *byte = (*byte & !mask) | value;
            }
        }
    }

    /// One code.
    pub fn get(&self, block: &[u8], lane: usize, code: usize) -> u8 {
        let read = |field: &Field| {
            let at = field.first + lane * field.stride;
            let next = block.get(at / 8 + 1).copied().unwrap_or(0);
            let word = u16::from_le_bytes([block[at / 8], next]) >> (at % 8);
            (((word & ((1 << field.bits) - 1)) ^ field.flip()) << field.low) as u8
        };
        self.fields[self.of_code[code].clone()].iter().map(read).fold(0, |all, own| all | own)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn codes_are_read_as_they_were_written_and_take_their_bits_only(
            bits in prop::collection::vec(1u32..=8, 1..90),
            noise in prop::collection::vec(any::<u8>(), 2 * 8 * 90),
            seed in any::<u64>(),
        ) {
            let layout = Lanes::new(&bits);
            let total: u32 = bits.iter().sum();
            prop_assert_eq!(8 * layout.bytes, LANES * total as usize);
            // Over whatever was there, in an order that visits neighbours apart from each other.
            let mut block = noise[..layout.bytes].to_vec();
            let value = |lane: usize, code: usize| {
                let mixed = seed.wrapping_mul((lane * 97 + code * 31 + 7) as u64) >> 13;
                (mixed & ((1 << bits[code]) - 1)) as u8
            };
            for lane in (0..LANES).rev() {
                for code in 0..bits.len() {
                    layout.put(&mut block, lane, code, value(lane, code));
                }
            }
            for lane in 0..LANES {
                for code in 0..bits.len() {
                    prop_assert_eq!(layout.get(&block, lane, code), value(lane, code), "lane {}, code {}", lane, code);
                }
            }
            // Nothing is left of the noise: the same codes over zeros are the same bytes.
            let mut clean = vec![0; layout.bytes];
            for lane in 0..LANES {
                for code in 0..bits.len() {
                    layout.put(&mut clean, lane, code, value(lane, code));
                }
            }
            prop_assert_eq!(block, clean);
        }

        #[test]
        fn fields_add_up_to_codes(bits in prop::collection::vec(1u32..=8, 1..90)) {
            let layout = Lanes::new(&bits);
            let mut seen = vec![0u64; bits.len()];
            for plane in &layout.planes {
                prop_assert_eq!(layout.masks(plane).iter().fold(0u64, |all, mask| all + u64::from(*mask)), (1 << plane.width) - 1);
                for (field, mask) in plane.fields.clone().zip(layout.masks(plane)) {
                    seen[layout.code(field)] += (f64::from(*mask) * f64::from(layout.place(field))) as u64;
                }
            }
            for (seen, bits) in seen.iter().zip(&bits) {
                prop_assert_eq!(*seen, (1 << bits) - 1);
            }
        }
    }

    /// What a vector loop makes of a lane: masked bits of planes as signed numbers, times their places, and biases.
    fn read_by_masks(layout: &Lanes, block: &[u8], lane: usize) -> Vec<f64> {
        let mut all: Vec<f64> = layout.biases().iter().map(|bias| f64::from(*bias)).collect();
        for plane in &layout.planes {
            let bit = |i: usize| {
                let at = 8 * plane.start + lane * plane.width as usize + i;
                u32::from(block[at / 8] >> (at % 8) & 1) << i
            };
            let bits: u32 = (0..plane.width as usize).map(bit).sum();
            for (field, mask) in plane.fields.clone().zip(layout.masks(plane)) {
                all[layout.code(field)] += f64::from((bits & mask) as i32) * f64::from(layout.place(field));
            }
        }
        all
    }

    proptest! {
        #[test]
        fn masks_places_and_biases_give_codes(
            bits in prop::collection::vec(1u32..=8, 1..90),
            block in prop::collection::vec(any::<u8>(), 2 * 8 * 90),
        ) {
            let layout = Lanes::new(&bits);
            for lane in 0..LANES {
                for (code, found) in read_by_masks(&layout, &block, lane).into_iter().enumerate() {
                    prop_assert_eq!(found, f64::from(layout.get(&block[..layout.bytes], lane, code)));
                }
            }
        }
    }

    #[test]
    fn equal_widths_that_divide_a_plane_are_whole() {
        for (bits, codes, whole) in [(2, 64, true), (4, 4, true), (8, 64, true), (3, 64, false), (1, 12, true)] {
            assert_eq!(Lanes::new(&vec![bits; codes]).whole(), whole, "{bits} bits of {codes}");
        }
    }
}
