// SPDX-License-Identifier: AGPL-3.0-or-later
/** Who exists here by rule. */
import { assert, describe, it } from "@effect/vitest"
import * as Effect from "effect/Effect"
import { AccountsConfig } from "../../layers/AccountsConfig.ts"
import type { Settings } from "../../layers/AccountsConfig.ts"
import { Accounts } from "../../src/services/Accounts.ts"

const resolve = (address: string, changes: Partial<Settings> = {}) =>
  Accounts.pipe(
    Effect.flatMap(({ resolve }) => resolve([address])),
    Effect.map(([one]) => (one?._tag === "Local" ? one.mailbox : one?._tag)),
    Effect.provide(
      AccountsConfig({
        domains: ["Pepsi.test", "bücher.example"],
        delimiter: "+",
        localParts: "any",
        ...changes
      })
    ),
    Effect.runSync
  )

describe("AccountsConfig", () => {
  it("takes any safe name in our domains, in one case, without its detail", () => {
    assert.strictEqual(resolve("Dave.X_1-y+Lists@PEPSI.test"), "dave.x_1-y")
    assert.strictEqual(resolve("dave@bücher.example"), "dave")
    assert.strictEqual(resolve("dave@XN--bcher-kva.example"), "dave")
    assert.strictEqual(resolve("postmaster@pepsi.test"), "postmaster")
    assert.strictEqual(resolve(`${"a".repeat(64)}@pepsi.test`), "a".repeat(64))
  })

  it("knows nobody whose name would not be safe as a directory", () => {
    for (const local of [
      ".hidden",
      "..",
      "a/b",
      '"a b"',
      '".."',
      '"../x"',
      "dävid",
      "+x",
      "a!b",
      '""',
      "a".repeat(65)
    ]) {
      assert.include(["Unknown", "Foreign"], resolve(`${local}@pepsi.test`), local)
    }
  })

  it("leaves other domains to others", () => {
    for (const address of [
      "dave@example.org",
      "dave@sub.pepsi.test",
      "dave@[127.0.0.1]",
      "dave",
      '"dave@pepsi.test"@example.org'
    ]) {
      assert.strictEqual(resolve(address), "Foreign", address)
    }
  })

  it("takes only the names given, and always postmaster and abuse", () => {
    const few = { localParts: ["Dave", "a+b"] }
    assert.strictEqual(resolve("dave+x@pepsi.test", few), "dave")
    assert.strictEqual(resolve("a+b@pepsi.test", few), "a+b")
    assert.strictEqual(resolve("eve@pepsi.test", few), "Unknown")
    assert.strictEqual(resolve("Abuse@pepsi.test", few), "abuse")
    assert.strictEqual(resolve("dave+x@pepsi.test", { ...few, delimiter: "" }), "Unknown")
  })
})
