// SPDX-License-Identifier: AGPL-3.0-or-later
/** The chapter of options: complete, and the file in docs is the one that is generated. */
import { existsSync, readFileSync } from "node:fs"
import { resolve } from "node:path"
import { assert, describe, it } from "@effect/vitest"
import * as Result from "effect/Result"
import * as Config from "../../src/config/Config.ts"
import * as Manual from "../../src/config/Manual.ts"
import type { Stage } from "../../src/pipeline/Stage.ts"
import { fakes } from "../support/FakeStages.ts"

const root = resolve(import.meta.dirname, "../..")
const index = resolve(root, "stages/index.ts")

/** All stages there are; the registry of a checkout that has not been generated yet is absent. */
const stages = async (): Promise<ReadonlyArray<Stage>> => {
  const { registry } = (await import(index)) as {
    readonly registry: Readonly<Record<string, () => Promise<{ readonly default: Stage }>>>
  }
  return Promise.all(Object.values(registry).map(async (load) => (await load()).default))
}

/** The kind of an option without its bounds. */
const kind = (type: string) => type.replace(/ from .*/, "")

const text = Manual.manual(fakes)

describe("Manual.manual", () => {
  it("has every option of every section and of every stage, with its default", () => {
    for (const [section, options] of Object.entries(Config.sections)) {
      assert.include(text, `## \`[${section}]\``)
      for (const name of Object.keys(options)) assert.include(text, `| \`${name}\` |`)
    }
    assert.include(text, "| `CONN_RATE_BURST` | `1` |")
    assert.include(text, "| `KEY_WAIT` | required | How long a key is waited for. | a duration |")
    assert.include(text, "| `WHEN_1 … WHEN_99` |  | A way. |")
  })

  it("does not depend on the machine it is made on", () => {
    assert.include(text, "| `PARALLELISM` | `CPUs` |")
  })

  it("says how a stage behaves", () => {
    assert.include(
      text,
      "### discard\n\nLoads metadata; outside effect: none; can run behind another stage; " +
        "takes no NEXT; asks no service.\n"
    )
    assert.isBelow(text.indexOf("### arc"), text.indexOf("### discard"))
  })

  it("keeps the tables whole: no cell has a bar or a line end of its own", () => {
    const rows = text.split("\n").filter((line) => line.startsWith("| "))
    for (const row of rows) assert.lengthOf(row.replaceAll("\\|", "").split("|"), 6, row)
  })

  it.skipIf(!existsSync(index))(
    "is what docs/configuration.md holds; if not, run npm run codegen",
    async () => {
      assert.strictEqual(
        readFileSync(resolve(root, Manual.file), "utf8"),
        Manual.manual(await stages())
      )
    }
  )
})

describe.skipIf(!existsSync(index))("the options of the stages", () => {
  it("have upper-case names, readable defaults and examples, and a sentence each", async () => {
    for (const stage of await stages()) {
      for (const [name, option] of Object.entries(stage.settings)) {
        const where = `${stage.name} ${name}`
        assert.match(name, /^[A-Z][A-Z0-9_]*$/, where)
        assert.match(option.doc, /^[A-Z].*\.$/, where)
        assert.isTrue(Result.isSuccess(option.read(option.example)), `${where} = ${option.example}`)
        if (option.default !== undefined && option.numbered === undefined) {
          assert.isTrue(
            Result.isSuccess(option.read(option.default)),
            `${where} = ${option.default}`
          )
        }
      }
    }
  })

  it("keep the kind of a common option that they declare again", async () => {
    const common: Readonly<Record<string, { readonly type: string }>> = Config.stage(1)
    for (const { name, settings } of await stages()) {
      for (const [key, option] of Object.entries(settings)) {
        if (Object.hasOwn(common, key))
          assert.strictEqual(kind(option.type), kind(common[key]!.type), name)
      }
    }
  })
})
