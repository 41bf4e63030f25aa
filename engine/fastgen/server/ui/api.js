// Requests to this server, with the key that the user has typed. It stays in this tab's sessionStorage.

const KEY = "fastgen-api-key";
const form = document.getElementById("key-form");
const field = document.getElementById("key");
field.value = sessionStorage.getItem(KEY) ?? "";

/** Call `action` when the key changes. */
export function onKey(action) {
  form.addEventListener("submit", action);
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, field.value.trim());
});

/** Return the response; throw an Error with the server's message unless the status is 2xx. */
export async function request(path, { body, signal } = {}) {
  const key = sessionStorage.getItem(KEY);
  const response = await fetch(path, {
    method: body ? "POST" : "GET",
    headers: { ...(body && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) },
    body: body && JSON.stringify(body),
    signal,
  });
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  const error = new Error(said?.error?.message ?? said?.status ?? response.statusText);
  error.status = response.status;
  if (response.status === 401 && document.activeElement === document.body) field.focus();
  throw error;
}

/** Yield the JSON of each server-sent event. */
export async function* events(path, options) {
  const reader = (await request(path, options)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
