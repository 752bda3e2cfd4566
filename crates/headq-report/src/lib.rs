//! Reports of HeadQ runs.
