//! Saved caches.
