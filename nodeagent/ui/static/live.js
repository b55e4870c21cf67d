// Replaces what has changed, without a jump: the same page is fetched again when the server says that something changed.
"use strict";
let pending = false;
async function refresh() {
  if (pending || document.hidden) return;
  // Nobody loses what is being typed.
  if (document.activeElement && document.activeElement.closest("form")) return;
  pending = true;
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
    if (!answer.ok) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const fresh = page.getElementById("live");
    const focused = document.activeElement && document.activeElement.getAttribute("href");
    document.getElementById("live").replaceWith(fresh);
    if (focused) fresh.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  } finally {
    pending = false;
  }
}
new EventSource("/changes").onmessage = refresh;
document.addEventListener("visibilitychange", refresh);
