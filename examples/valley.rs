//! The language of the embedded model: pages from the chronicle of a valley, written by a seeded generator.
//!
//! Each page names a few people and what they own, and sings a rhyme of random words; then the clerk reads what was said again, in
//! another order, and the rhyme is sung once more. A good part of the second half can only be predicted by looking back, 60 to
//! 220 tokens, at the first half, which is exactly what a quantized KV cache makes harder.
//!
//! Text is made of [`words`](crate::words): a page is [`PAGE`] tokens, so that windows of that many tokens are whole pages.

use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, RngExt};

/// Tokens in a page, the line break after it included.
pub const PAGE: usize = 256;
/// The token between two paragraphs of a page.
pub const PARAGRAPH: &str = "\n";
/// The token that ends a page.
pub const PAGE_END: &str = "\n\n";

const NAMES: &[&str] = &[
    "Anna", "Boris", "Clara", "David", "Emil", "Flora", "Greta", "Hugo", "Irene", "Jonas", "Karin", "Lukas", "Mara",
    "Nils", "Olga", "Pavel",
];
const SURNAMES: &[&str] = &[
    "Ash", "Berg", "Carver", "Dale", "Fisher", "Glover", "Hill", "Lake", "Mason", "Potter", "Reed", "Stone", "Turner",
    "Vale", "Weaver", "Wood",
];
const TOWNS: &[&str] = &[
    "Oakham",
    "Birchley",
    "Millford",
    "Stonebury",
    "Ashwick",
    "Elmsworth",
    "Fernhill",
    "Harrowgate",
    "Kingsmere",
    "Larkfield",
    "Marshcote",
    "Thornby",
];
const COLOURS: &[&str] =
    &["red", "blue", "green", "yellow", "white", "black", "brown", "grey", "purple", "orange", "pink", "golden"];
const NUMBERS: &[&str] =
    &["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "twenty"];
const GOODS: &[&str] = &[
    "bells", "coins", "pearls", "shells", "buttons", "candles", "feathers", "keys", "marbles", "needles", "ribbons",
    "spoons", "stamps", "beads", "dice", "rings",
];
const TOOLS: &[&str] = &[
    "rope", "lamp", "drum", "saw", "kettle", "broom", "chisel", "sieve", "hammer", "ladder", "bucket", "anchor",
    "plough", "scythe", "barrel", "flute", "candle", "mirror", "basket", "blanket", "wheel", "bottle", "pillow",
    "spade", "whistle", "carpet", "fiddle", "lantern", "teapot", "rake", "anvil", "cradle",
];

const ENTITIES: [&[&str]; 7] = [NAMES, SURNAMES, TOWNS, COLOURS, NUMBERS, GOODS, TOOLS];

/// First line of a page.
const TITLES: &[&str] = &["The Fair at {town}", "A Day in {town}", "The Road to {town}", "Winter in {town}"];

/// What is said of each person, and said again; one of them on each page.
const FACTS: &[&str] = &[
    "{name} {surname} brings {number} {colour} {goods} to {town} .",
    "{name} {surname} keeps {number} {colour} {goods} in {town} .",
    "{name} {surname} buys {number} {colour} {goods} from {town} .",
];
const READ_AGAIN: &[&str] = &["Then the clerk reads it again .", "So it is written in the book ."];

/// A counting rhyme, and the rhyme again.
const RHYMES: &[&str] = &["The children sing a rhyme", "An old song goes like this"];
const SUNG_AGAIN: &[&str] = &["At dusk they sing it again", "By night all sing once more"];

/// Single questions.
const QUESTIONS: &[&str] =
    &["Who has the {colour} {goods} ? {name} {surname} .", "Who goes to {town} ? {name} {surname} ."];

/// Sentences with nothing to remember, of every length from 5 to 9 tokens, so that any gap of 5 or more can be filled.
const FILLERS: &[&str] = &[
    "The morning was cold .",
    "The river ran high .",
    "Nobody was in a hurry .",
    "Snow lay on the hills .",
    "The cook made soup for everyone .",
    "A dog slept under the table .",
    "The wind came down from the hills .",
    "Children sang by the old stone bridge .",
    "The rain fell all day on the roofs .",
    "Far away a cart rolled over the bridge .",
];

/// Shortest and longest filler.
const FILLER_TOKENS: (usize, usize) = (5, 9);
/// Fillers between what is said and what is recalled take at least so many tokens.
const GAP: usize = 8;
/// People on a page.
const PEOPLE: usize = 9;
/// Words in a rhyme.
const RHYME: usize = 24;

/// All tokens that pages are made of, each once, in a fixed order.
pub fn vocabulary() -> Vec<&'static str> {
    let templates = [TITLES, FACTS, READ_AGAIN, RHYMES, SUNG_AGAIN, QUESTIONS, FILLERS].into_iter().flatten();
    let of_templates = templates.flat_map(|t| t.split(' ')).filter(|w| !w.starts_with('{'));
    let entities = ENTITIES.into_iter().flatten().copied();
    let mut all = Vec::new();
    for word in [PAGE_END, PARAGRAPH, ".", ":", "?"].into_iter().chain(entities).chain(of_templates) {
        if !all.contains(&word) {
            all.push(word);
        }
    }
    all
}

/// A person and all that is said of them.
#[derive(Debug, Clone, Copy)]
struct Person {
    name: &'static str,
    surname: &'static str,
    town: &'static str,
    colour: &'static str,
    number: &'static str,
    goods: &'static str,
}

/// A page being written.
#[derive(Debug, Default)]
struct Draft(Vec<&'static str>);

impl Draft {
    fn say(&mut self, template: &'static str, who: &Person) {
        self.0.extend(template.split(' ').map(|word| match word {
            "{name}" => who.name,
            "{surname}" => who.surname,
            "{town}" => who.town,
            "{colour}" => who.colour,
            "{number}" => who.number,
            "{goods}" => who.goods,
            word => word,
        }));
    }

    fn rhyme(&mut self, opening: &'static str, rhyme: &[&'static str]) {
        self.0.extend(opening.split(' '));
        self.0.push(":");
        self.0.extend(rhyme);
        self.0.push(".");
    }

    fn fill(&mut self, mut tokens: usize, rng: &mut impl Rng) {
        let length = |filler: &str| filler.split(' ').count();
        while tokens > 0 {
            let fits = |filler: &&&str| tokens == length(filler) || tokens >= length(filler) + FILLER_TOKENS.0;
            let fitting: Vec<&&str> = FILLERS.iter().filter(fits).collect();
            let filler = fitting.choose(rng).expect("there is a filler of each length from 5 to 9");
            self.0.extend(filler.split(' '));
            tokens -= length(filler);
        }
    }
}

/// `n` different items in random order.
fn some(items: &[&'static str], n: usize, rng: &mut impl Rng) -> Vec<&'static str> {
    let mut items = items.to_vec();
    items.shuffle(rng);
    items.truncate(n);
    items
}

fn one(items: &[&'static str], rng: &mut impl Rng) -> &'static str {
    items.choose(rng).expect("templates are not empty")
}

/// One page: [`PAGE`] tokens, the last of them [`PAGE_END`].
pub fn page(rng: &mut impl Rng) -> Vec<&'static str> {
    let (names, surnames) = (some(NAMES, PEOPLE, rng), some(SURNAMES, PEOPLE, rng));
    let (towns, colours) = (some(TOWNS, PEOPLE, rng), some(COLOURS, PEOPLE, rng));
    let (numbers, goods) = (some(NUMBERS, PEOPLE, rng), some(GOODS, PEOPLE, rng));
    let person = |i: usize| Person {
        name: names[i],
        surname: surnames[i],
        town: towns[i],
        colour: colours[i],
        number: numbers[i],
        goods: goods[i],
    };
    let mut people: Vec<Person> = (0..PEOPLE).map(person).collect();
    let rhyme = some(TOOLS, RHYME, rng);
    let fact = one(FACTS, rng);

    let mut opening = Draft::default();
    opening.say(one(TITLES, rng), &people[rng.random_range(0..PEOPLE)]);
    opening.0.push(PARAGRAPH);
    for person in &people {
        opening.say(fact, person);
    }
    opening.0.push(PARAGRAPH);
    opening.rhyme(one(RHYMES, rng), &rhyme);

    let mut closing = Draft::default();
    closing.0.push(PARAGRAPH);
    closing.0.extend(one(READ_AGAIN, rng).split(' '));
    people.shuffle(rng);
    for person in &people {
        closing.say(fact, person);
    }
    closing.0.push(PARAGRAPH);
    closing.rhyme(one(SUNG_AGAIN, rng), &rhyme);
    people.shuffle(rng);
    for person in &people {
        let mut question = Draft::default();
        question.say(one(QUESTIONS, rng), person);
        if opening.0.len() + closing.0.len() + question.0.len() + GAP < PAGE {
            closing.0.extend(question.0);
        }
    }
    let gap = PAGE - 1 - opening.0.len() - closing.0.len();
    let mut page = opening;
    page.fill(gap, rng);
    page.0.extend(closing.0);
    page.0.push(PAGE_END);
    page.0
}

/// An exercise, for training only: some random words, over and over, `length` tokens in all.
///
/// A repetition begins after an eighth to three eighths of the exercise. Looking back is learned much sooner from short exercises
/// than from whole pages.
pub fn drill(length: usize, rng: &mut impl Rng) -> Vec<&'static str> {
    let all: Vec<&'static str> = ENTITIES.into_iter().flatten().copied().collect();
    let period = rng.random_range(length / 8..=length * 3 / 8);
    some(&all, period, rng).into_iter().cycle().take(length).collect()
}

/// Writes tokens as text: a space between words, none before punctuation or around line breaks.
pub fn render(tokens: &[&str]) -> String {
    let mut text = String::new();
    for token in tokens {
        let tight = matches!(*token, "." | ":" | "?" | PARAGRAPH | PAGE_END);
        if !tight && !text.is_empty() && !text.ends_with('\n') {
            text.push(' ');
        }
        text += token;
    }
    text
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    use super::*;

    #[test]
    fn pages_have_the_same_length_and_known_words() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let known = vocabulary();
        for _ in 0..2000 {
            let page = page(&mut rng);
            assert_eq!(page.len(), PAGE);
            assert_eq!(page.iter().position(|t| *t == PAGE_END), Some(PAGE - 1));
            assert!(page.iter().all(|word| known.contains(word)));
        }
    }

    #[test]
    fn the_same_seed_writes_the_same_page() {
        let write = |seed| render(&page(&mut ChaCha8Rng::seed_from_u64(seed)));
        assert_eq!(write(7), write(7));
        assert_ne!(write(7), write(8));
    }

    #[test]
    fn fillers_have_every_length() {
        let (shortest, longest) = FILLER_TOKENS;
        for wanted in shortest..=longest {
            assert!(FILLERS.iter().any(|f| f.split(' ').count() == wanted), "no filler of {wanted} tokens");
        }
        assert!(FILLERS.iter().all(|f| (shortest..=longest).contains(&f.split(' ').count())));
    }

    #[test]
    fn what_is_recalled_was_said_before() {
        let page = page(&mut ChaCha8Rng::seed_from_u64(3));
        for name in NAMES {
            let places: Vec<usize> = (0..PAGE).filter(|&i| page[i] == *name).collect();
            assert!(places.is_empty() || places.len() >= 2, "{name} is named once");
        }
    }
}
