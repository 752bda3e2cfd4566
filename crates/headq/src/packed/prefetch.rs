//! Asking for memory before it is needed.
//!
//! A tile's codes lie in several short stretches, too short for the machine to see them coming; without a word in time every one of
//! them begins with a wait.
#![allow(unsafe_code)]

/// Bytes that come from memory together.
const LINE: usize = 64;

/// Starts to fetch what a slice holds; changes nothing but how soon it is there.
#[inline(always)]
pub(super) fn prefetch<T>(x: &[T]) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let start = x.as_ptr().cast::<i8>();
        for at in (0..size_of_val(x)).step_by(LINE) {
            // SAFETY: SSE is part of x86-64, and a prefetch touches no memory that a program could see, whatever the address is; this
            // one lies within the slice.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(at)) };
        }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = (x, LINE);
}
