// SPDX-License-Identifier: AGPL-3.0-or-later
/** Inlined files: order, loops, bounds, permissions; on a real file system. */
import * as NodeFileSystem from "@effect/platform-node/NodeFileSystem"
import { assert, describe, it } from "@effect/vitest"
import * as Effect from "effect/Effect"
import * as FileSystem from "effect/FileSystem"
import { resolve } from "node:path"
import * as IniFiles from "../../layers/IniFiles.ts"
import * as Ini from "../../src/config/Ini.ts"

/** Writes files into a directory of its own and reads `main.conf` there; gives relative names. */
const read = Effect.fnUntraced(function* (
  files: { readonly [name: string]: string },
  before: (directory: string, system: FileSystem.FileSystem) => Effect.Effect<void, unknown> = () =>
    Effect.void
) {
  const system = yield* FileSystem.FileSystem
  const directory = yield* Effect.flatMap(system.makeTempDirectoryScoped(), system.realPath)
  for (const [name, text] of Object.entries(files)) {
    yield* system.makeDirectory(resolve(directory, name, ".."), { recursive: true })
    yield* system.writeFileString(resolve(directory, name), text)
  }
  yield* before(directory, system)
  const { items, problems, warnings } = yield* IniFiles.read(`${directory}/main.conf`)
  const short = (text: string) => text.replaceAll(`${directory}/`, "")
  return {
    problems: problems.map((problem) => short(Ini.format(problem))),
    warnings: warnings.map(short),
    values: Ini.assemble(items).flatMap(({ name, options }) =>
      options.map(
        ({ option, secret, value }) => `${name} ${option}=${value}${secret ? " (secret)" : ""}`
      )
    )
  }
}, Effect.provide(NodeFileSystem.layer))

describe("IniFiles.read", () => {
  it.effect("puts a file in where it is named, and goes on in the section it was in", () =>
    Effect.gen(function* () {
      const found = yield* read({
        "main.conf": "[a]\nX = 1\nY = 1\n@inline@ sub/b.conf\nZ = 1\n",
        "sub/b.conf": "[a]\nX = 2\nZ = 2\n[b]\n@inline@ c.conf\n",
        "sub/c.conf": "[b]\nX = 3\n"
      })
      assert.deepStrictEqual(found, {
        problems: [],
        warnings: [],
        values: ["a X=2", "a Y=1", "a Z=1", "b X=3"]
      })
    })
  )

  it.effect("reads what matches in the order of the names, hidden files not", () =>
    Effect.gen(function* () {
      const found = yield* read({
        "main.conf": "@inline-matching@ d/*.conf\n@inline-matching@ none/*.conf\n",
        "d/9.conf": "[a]\nX = 9\n",
        "d/10.conf": "[a]\nX = 10\n",
        "d/.hidden.conf": "[a]\nX = hidden\n",
        "d/readme": "no configuration"
      })
      assert.deepStrictEqual(found, { problems: [], warnings: [], values: ["a X=9"] })
    })
  )

  it.effect("tells of a loop with both its files, also through a link", () =>
    Effect.gen(function* () {
      const found = yield* read(
        { "main.conf": "[a]\n@inline@ b.conf\n", "b.conf": "[b]\nX = 1\n@inline@ link.conf\n" },
        (directory, system) => system.symlink(`${directory}/main.conf`, `${directory}/link.conf`)
      )
      assert.deepStrictEqual(found, {
        problems: ["b.conf:3: link.conf: a loop: it inlines b.conf itself"],
        warnings: [],
        values: ["b X=1"]
      })
    })
  )

  it.effect("stops where files are too deep or too many", () =>
    Effect.gen(function* () {
      const chain = Object.fromEntries(
        Array.from({ length: 140 }, (_, i) => [
          i === 0 ? "main.conf" : `${i}.conf`,
          `@inline@ ${i + 1}.conf\n`
        ])
      )
      assert.deepStrictEqual((yield* read(chain)).problems, [
        "127.conf:1: 128.conf: more than 128 files deep"
      ])
      // Each of 20 files inlines the next one twice: a million readings if nobody counted.
      const twice = Object.fromEntries(
        Array.from({ length: 20 }, (_, i) => [
          i === 0 ? "main.conf" : `${i}.conf`,
          i === 19 ? "[a]\n" : `@inline@ ${i + 1}.conf\n`.repeat(2)
        ])
      )
      const { problems } = yield* read(twice)
      assert.isAbove(problems.length, 0)
      assert.match(problems[0]!, /more than 1000 files in all$/)
    })
  )

  it.effect("refuses what is no text of a sensible size", () =>
    Effect.gen(function* () {
      const found = yield* read({
        "main.conf": "@inline@ big.conf\n@inline@ /dev/zero\n@inline@ .\n",
        "big.conf": "#".repeat(Ini.maxFileBytes + 1)
      })
      assert.deepStrictEqual(
        found.problems.map((text) => text.replace(/ \/\S*:/, " DIRECTORY:")),
        [
          `main.conf:1: big.conf: is larger than ${Ini.maxFileBytes} octets`,
          "main.conf:2: DIRECTORY: is no regular file",
          "main.conf:3: DIRECTORY: is no regular file"
        ]
      )
    })
  )

  it.effect("refuses more sections than a person can survey", () =>
    Effect.gen(function* () {
      const sections = Array.from({ length: Ini.maxSections + 1 }, (_, i) => `[s${i}]\n`).join("")
      assert.deepStrictEqual((yield* read({ "main.conf": sections })).problems, [
        `main.conf: has more than ${Ini.maxSections} sections`
      ])
    })
  )

  it.effect("takes one section of a file of secrets, and nothing it inlines", () =>
    Effect.gen(function* () {
      const found = yield* read(
        {
          "main.conf": "@inline-secret@ Keys s.conf\n[keys]\nY = 2\n",
          "s.conf": "[other]\nX = 1\n[KEYS]\nX = 2\n@inline@ main.conf\n"
        },
        (directory, system) => system.chmod(`${directory}/s.conf`, 0o600)
      )
      assert.deepStrictEqual(found, {
        problems: ["s.conf:5: a file of secrets inlines nothing"],
        warnings: [],
        values: ["keys X=2 (secret)", "keys Y=2"]
      })
    })
  )

  it.effect.each([0o640, 0o604, 0o644])(
    "refuses a file of secrets that others may read (%o)",
    (mode) =>
      Effect.gen(function* () {
        const found = yield* read(
          { "main.conf": "@inline-secret@ keys s.conf\n", "s.conf": "[keys]\nX = 1\n" },
          (directory, system) => system.chmod(`${directory}/s.conf`, mode)
        )
        assert.deepStrictEqual(found, {
          problems: ["main.conf:1: s.conf: group or others may read these secrets; chmod 600"],
          warnings: [],
          values: []
        })
      })
  )
})
