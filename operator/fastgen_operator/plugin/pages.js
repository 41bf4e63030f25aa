// Replaces the content instead of the page, so that focus and scroll position stay. Waits while the page is hidden or
// text is selected.
const said = document.getElementById("said");
setInterval(async () => {
  if (document.hidden || !getSelection().isCollapsed) return;
  try {
    const text = await (await fetch(location.href)).text();
    const next = new DOMParser().parseFromString(text, "text/html");
    const focused = document.activeElement.id;
    document.querySelector("main").replaceWith(next.querySelector("main"));
    document.title = next.title;
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
    said.textContent = "";
  } catch {
    said.textContent = "kubectl fastgen dashboard does not answer. This page is out of date.";
  }
}, RELOAD_MILLISECONDS);
