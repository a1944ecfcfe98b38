// SPDX-License-Identifier: Apache-2.0
// Searches the built site as a browser does, in the theme's own worker: node tests/search.mjs SITE QUERY...
// Prints a JSON list for each query: the pages found, best first.
import { readdirSync, readFileSync } from "node:fs"
import { createContext, runInContext } from "node:vm"

const [site, ...queries] = process.argv.slice(2)
const workers = `${site}/assets/javascripts/workers`
const answers = []
const handlers = []
const scope = createContext({
  addEventListener: (_, handler) => handlers.push(handler),
  postMessage: message => answers.push(message),
  console,
  URL,
})
scope.self = scope
runInContext(readFileSync(`${workers}/${readdirSync(workers).find(name => name.endsWith(".js"))}`, "utf8"), scope)

const index = JSON.parse(readFileSync(`${site}/search/search_index.json`, "utf8"))
const messages = [{ type: 0, data: { ...index, options: {} } }, ...queries.map(data => ({ type: 2, data }))]
for (const data of messages) {
  handlers.forEach(handler => handler({ data }))
  await new Promise(resolve => setTimeout(resolve))
}
for (const { data } of answers.slice(1)) console.log(JSON.stringify(data.items.map(sections => sections[0].location)))
